# Two commands for newcomers: `make demo`, `make test`. Needs python3 (3.10 to 3.13) with venv, a C++ compiler, make.
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ~/.config/pip) are the user's and pass through.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

NATIVE := CMakeLists.txt pyproject.toml $(wildcard src/_native/*)
SETUP := $(VENV)/.setup
# Virtual machines end with make, also where that is killed.
WITH_MAKE := $(if $(shell command -v setpriv),setpriv --pdeathsig TERM)

.PHONY: demo test test-all test-long test-versions test-rdma bench-rdma test-gpu check check-coverage check-native setup setup-mxnet test-mxnet setup-tensorflow test-tensorflow format docs clean

demo: setup
	$(BIN)/python examples/fcn5/demo.py $(ARGS)

# Three files of tests at a time, because many wait for other processes. ARGS=-n0: one after another, as --pdb needs.
# ARGS="-m 'slow or not slow' FILE": the slow tests of a file, too. TENSORWIRE_TEST_PATIENCE=4 make test: every time limit
# four times as long.
AT_A_TIME := -n 3 --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest $(AT_A_TIME) --durations=10 --durations-min=5
test: setup
	@$(if $(ARGS),,echo "The tests take 5 to 15 minutes on 2 cores. A busy machine takes longer: if a time limit runs out there, set TENSORWIRE_TEST_PATIENCE=4.")
	$(PYTEST) $(ARGS)

# With the slow tests: more models, devices and launchers, whole benchmarks, and trainings that are killed.
test-all: test
	$(PYTEST) -m 'slow and not long' $(ARGS)

# More models, cuts, workers and devices of the tests of graphs, and a thousand random programs.
test-long: setup
	$(PYTEST) -m long $(ARGS)

# The fast tests under each Python that we claim, with the oldest, the pinned and the newest torch: 10 minutes each, and
# the environments take minutes and gigabytes once. ARGS="3.10" for one; ARGS="3.10 -- tests/edge" for some of its tests.
test-versions:
	$(PYTHON) tests/versions.py $(ARGS)

# The adapter for MXNet 1.9.1, in an environment of its own, with Python 3.10 or 3.11.
MXNET := .venv-mxnet
MXNET_PYTHON ?= $(shell for p in python3.11 python3.10 python3; do $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null && echo $$p && break; done)
test-mxnet: setup-mxnet
	$(MXNET)/bin/python -m pytest $(AT_A_TIME) tests/mxnet $(ARGS)

setup-mxnet: $(MXNET)/.setup

$(MXNET)/.setup: $(NATIVE) Makefile
	@test -n "$(MXNET_PYTHON)" || { echo "MXNet 1.9.1 needs Python 3.10 or 3.11, and neither is here. Try: make $(MAKECMDGOALS) MXNET_PYTHON=PATH"; exit 1; }
	@echo "making $(MXNET)"
	@test -x $(MXNET)/bin/python || $(MXNET_PYTHON) -m venv $(MXNET)
	$(MXNET)/bin/python -m pip install --quiet --disable-pip-version-check scikit-build-core nanobind cmake ninja setuptools wheel
	PATH="$(abspath $(MXNET)/bin):$$PATH" $(MXNET)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		-C build-dir=build/mxnet -e '.[mxnet,testing,verbs]' idx2numpy pytest-xdist
	@touch $@

# The adapter for TensorFlow 2.21, likewise.
TENSORFLOW := .venv-tensorflow
test-tensorflow: setup-tensorflow
	$(TENSORFLOW)/bin/python -m pytest $(AT_A_TIME) tests/tensorflow $(ARGS)

setup-tensorflow: $(TENSORFLOW)/.setup

$(TENSORFLOW)/.setup: $(NATIVE) Makefile
	@echo "making $(TENSORFLOW)"
	@test -x $(TENSORFLOW)/bin/python || $(PYTHON) -m venv $(TENSORFLOW)
	$(TENSORFLOW)/bin/python -m pip install --quiet --disable-pip-version-check scikit-build-core nanobind cmake ninja setuptools wheel
	PATH="$(abspath $(TENSORFLOW)/bin):$$PATH" $(TENSORFLOW)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		-C build-dir=build/tensorflow -e '.[tensorflow,testing,verbs]' pytest-xdist
	@touch $@

# Real RDMA, without a NIC: in virtual machines with Soft-RoCE. Needs root on Debian 12 or Ubuntu; says so where it cannot
# run. ARGS="guest" for a part; see docs/testing.md for commands of your own.
test-rdma: setup
	$(WITH_MAKE) $(BIN)/python -m tests.rdma $(ARGS)

# Our writes beside perftest's in such a machine: emulation, whose ratios alone mean something.
bench-rdma: setup
	$(WITH_MAKE) $(BIN)/python -m tests.rdma --timeout 900 -- $(BIN)/python -m tests.rdma.bench $(ARGS)

# The store on this machine's accelerator: right to the bit, and how fast; at most ten minutes. ARGS=--help;
# ARGS="--device sim --quick" tries the program without an accelerator, in two minutes.
test-gpu: setup
	$(BIN)/python -m tests.gpu $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_public_names.py

# The fast tests once more, with the lines counted that run in their own process and in those of jobs. Coverage
# keeps files of its own, so tests are left out in which a process may leave none, or can write none.
check-coverage: setup
	$(PYTEST) --ignore tests/examples --deselect "tests/launch/test_scarce.py::test_a_limit_that_stops_a_job_is_one_line_before_anything_starts[ulimit -f 0" \
	  --cov --cov-report= --cov-fail-under=0 $(ARGS)
	$(BIN)/coverage report

# Sanitizers over the native core; ARGS=threads, leaks or address for one part.
check-native: setup
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/native/check.py $(ARGS)

setup: $(SETUP)

# --no-build-isolation: the build then keeps its own cache, and a change of C++ costs seconds.
$(SETUP): $(NATIVE) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "tensorwire needs Python 3.10 to 3.13; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing what the build needs, and PyTorch; the first time takes minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt scikit-build-core nanobind cmake ninja setuptools wheel
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		-c constraints.txt -e '.[torch,demo,dev]'
	@touch $@

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf build dist site src/tensorwire/_native.pyi $(VENV) $(MXNET) $(TENSORFLOW) .versions .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis
