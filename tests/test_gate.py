"""The gate, `.ci/run`, ends as its parts do. Stand-ins play the parts: the real ones take half an hour and more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.testing.patience import patient
from tests.gate import FOLDER, MOST, WITHOUT, in_guests

ROOT = Path(__file__).parents[1]
GATE = ROOT / ".ci" / "run"
GUESTS, LAST = "test-rdma", "demo"
# Says what it is told to make, and fails at what FAILS names. If that runs beside the guests, these outlast it.
MAKE = """#!/bin/sh
echo "making $*"
[ "$1" != test-rdma ] || echo "$GUESTS_SAY"
case "$1 $FAILS" in
"test-rdma check-native") echo $$ >"$GUEST"; exec sleep 1000 ;;
"check-native check-native") until [ -s "$GUEST" ]; do :; done ;;
esac
[ "$1" != "$FAILS" ] || exit 3
"""


@pytest.fixture
def gate(tmp_path: Path) -> dict[str, str]:
    """The environment in which the gate has stand-ins: other tests may run, of which it would find processes."""
    for name, text in {
        "make": MAKE,
        "pgrep": "#!/bin/sh\nexit 1\n",
        "ls": "#!/bin/sh\n",
        "apt-get": "#!/bin/sh\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    own = {"FAILS": "", "GUEST": str(tmp_path / "guest"), "GUESTS_SAY": "", FOLDER: str(tmp_path / "kept")}
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **own}


def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(GATE)], env=environment, capture_output=True, text=True, timeout=patient(60.0))


def test_it_passes_when_all_parts_do(gate: dict[str, str]) -> None:
    done = run(gate)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"making {GUESTS}" in done.stdout
    assert done.stdout.rstrip().endswith("all good")


@pytest.mark.parametrize("part", ["docs", "test-all", "test-tensorflow", GUESTS, "check", LAST])
def test_it_fails_when_a_part_does(gate: dict[str, str], part: str) -> None:
    done = run({**gate, "FAILS": part})
    assert done.returncode != 0
    assert f"making {part}" in done.stdout
    assert "all good" not in done.stdout


def test_the_guests_end_with_it(gate: dict[str, str]) -> None:
    assert run({**gate, "FAILS": "check-native"}).returncode != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path(gate["GUEST"]).read_text()), 0)


def test_the_environments_that_tests_need_are_made_before_them(gate: dict[str, str]) -> None:
    needed = {
        f"make setup-{name}"
        for path in (*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py"))
        for name in re.findall(r"make setup-(\w+)", path.read_text())
    }
    assert needed == {"make setup-mxnet", "make setup-tensorflow"}
    made = [line for line in run(gate).stdout.splitlines() if line.startswith("making ")]
    first_tests = min(made.index(f"making {part}") for part in ("test-all", GUESTS))
    without = [] if "making test-mxnet" in made else ["make setup-mxnet"]
    for command in needed.difference(without):
        assert made.index(command.replace("make", "making", 1)) < first_tests


def test_failed_tests_in_guests_run_once_more(gate: dict[str, str]) -> None:
    said = (
        "FAILED tests/rdma/guest/test_a.py::test_it[a-1] - assert 1 == 2\nvm1 | ERROR tests/rdma/two/test_b.py::test_b"
    )
    done = run({**gate, "FAILS": GUESTS, "GUESTS_SAY": said})
    assert done.returncode != 0  # as the second time ends as the first
    assert "making test-rdma ARGS=guest --only 'tests/rdma/guest/test_a.py::test_it[a-1]'" in done.stdout
    assert "making test-rdma ARGS=two --only 'tests/rdma/two/test_b.py::test_b'" in done.stdout
    assert "failed twice: tests/rdma/two/test_b.py::test_b" in done.stdout
    assert in_guests("harness: 3 failed, 9 passed") == []


def test_the_tests_of_guests_can_be_read() -> None:
    """They use what other tests define, and run late and elsewhere."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "", "tests/rdma"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(60.0))
    assert done.returncode == 0, done.stdout


# ---- what it keeps of its tests

ONCE = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({count}))
def test_fails_once(number):
    seen = pathlib.Path(__file__).with_name(f"{{number}}.seen")
    if not seen.exists():
        seen.touch()
        print("what it printed")
        raise ValueError("the first time")

def test_passes():
    pass
"""


class Kept:
    """Runs of pytest as in the gate, in a folder with one file of tests."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept = folder, folder / "kept"
        self.kept.mkdir()

    def pytest(self, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "test_it.py").write_text(text)
        own = {FOLDER: str(self.kept), "PYTEST_ADDOPTS": "-p tests.gate", "PYTHONPATH": str(ROOT)}
        own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer to load than these tests
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        return self._run(command, {**os.environ, **own, **environment})

    def end(self) -> subprocess.CompletedProcess[str]:
        """The gate's end. Its second runs need the options of the first ones' project."""
        for path in self.kept.glob("*.json"):
            path.write_text(path.read_text().replace('"test_it.py', f'"{self.folder}/test_it.py'))
        return self._run([sys.executable, str(ROOT / "tests" / "gate.py"), str(self.kept)], dict(os.environ))

    def _run(self, command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=patient(60.0)
        )


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_a_test_that_fails_once_is_unsteady(kept: Kept) -> None:
    assert kept.pytest(ONCE.format(count=1)).returncode == 0
    done = kept.end()
    assert done.returncode == 0, done
    shown = done.stdout.partition("unsteady: ")[2]
    assert "test_it.py::test_fails_once[0]" in shown
    assert "ValueError: the first time" in shown
    assert "what it printed" in shown
    assert "test_passes" not in shown
    assert "test_it.py::test_passes" in done.stdout  # with its seconds


def test_a_test_that_fails_twice_fails_the_gate(kept: Kept) -> None:
    assert kept.pytest("def test_fails():\n    assert 1 == 2").returncode == 0
    done = kept.end()
    assert done.returncode == 1
    assert "unsteady: " not in done.stdout
    assert "failed twice: " in done.stdout


def test_a_few_unsteady_tests_pass_and_more_fail_the_gate(kept: Kept) -> None:
    assert kept.pytest(ONCE.format(count=MOST)).returncode == 0
    assert kept.end().returncode == 0
    assert kept.pytest("def test_passes():\n    pass").returncode == 0
    (kept.folder / "0.seen").unlink()
    assert kept.pytest(ONCE.format(count=MOST)).returncode == 0  # one too many, in another run
    assert kept.end().returncode == 1


def test_a_run_in_which_many_tests_fail_fails(kept: Kept) -> None:
    assert kept.pytest(ONCE.format(count=MOST + 1)).returncode == 1


def test_a_run_that_finds_no_tests_or_cannot_read_them_fails(kept: Kept) -> None:
    assert kept.pytest("").returncode == 5
    assert kept.pytest("import nothing_like_it").returncode == 2


SKIPS = """
import pytest

@pytest.mark.skipif(True, reason="there is no environment: make setup-mxnet")
def test_it():
    pass
"""


def test_a_skip_for_want_of_an_environment_fails_its_run(kept: Kept) -> None:
    done = kept.pytest(SKIPS)
    assert done.returncode == 1
    assert "the gate makes what this test lacks" in done.stdout
    assert kept.pytest(SKIPS, **{WITHOUT: "make setup-mxnet"}).returncode == 0
    assert kept.pytest(SKIPS.replace("make setup-mxnet", "buy one")).returncode == 0
