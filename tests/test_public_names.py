"""The public names are what the documentation says, documented, and nothing more."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import textwrap
import tokenize
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

import tensorwire

SOURCE = Path(tensorwire.__file__).parent
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
LAYERS = [
    "observe",
    "device",
    "control",
    "edge",
    "graph",
    "store",
    "launch",
    "keyvalue",
    "files",
    "trace",
    "charts",
    "torch",
    "mxnet",
    "tensorflow",
    "doctor",
    "bench",
    "cli",
    "testing",
]
PUBLIC = {
    "tensorwire": {"Job", "__version__", "errors", "init", "worker"},
    "tensorwire.torch": {"ShardSampler", "StoreEmbedding", "StoreOptimizer", "clip_grad_norm_", "place", "unplace"},
    "tensorwire.store": {
        *("EASGD", "SGD", "SSP", "Async", "DiLoCo", "Handle", "KeyValue", "LocalSGD", "Sync"),
        *("Every", "Listing", "Loader", "Reader", "ReaderState", "Staged", "VersionState", "connect"),
    },
    "tensorwire.files": {"Folder", "PushFile", "Status", "VersionFile", "connect", "open"},
    "tensorwire.device": {
        "Capabilities",
        "Channel",
        "Completion",
        "Device",
        "LoopbackDevice",
        "Region",
        "RemoteRegion",
        "RemoteView",
        "ShmDevice",
        "TcpDevice",
        "VerbsDevice",
        "View",
        "connect_peer",
        "device_names",
        "find_device",
    },
    "tensorwire.graph": {"Analysis", "Edge", "Graph", "Node", "Output", "Plan", "TensorSpec", "Unknown", "analyze"},
    "tensorwire.edge": {
        *("Consumer", "Producer", "Spec", "Word", "Lease", "Pool", "Received", "connect_edge"),
        *("ConsumerEnd", "ProducerEnd", "StaticProducer", "BoundedProducer", "DynamicProducer"),
    },
    "tensorwire.observe": {"Counters", "LiveCounters", "Spans", "counters", "pickles_counted", "spans"},
    "tensorwire.testing": {"FaultyChannel", "FaultyDevice"},
    "tensorwire.errors": {
        *("AlreadyPublished", "ArgumentError", "AuthenticationError", "ControlError", "DeviceError"),
        *(
            "ChecksumMismatch",
            "GradientModified",
            "JobEnded",
            "NotOnThisWorker",
            "MissingPackage",
            "NonFiniteGradient",
            "OutOfMemory",
        ),
        *("ParameterModified", "PeerLost", "PlanMismatch", "ProtocolError", "RegionClosed"),
        *(
            "RemoteAccessError",
            "StepInterrupted",
            "TensorwireError",
            "Unsupported",
            "VerbsUnavailable",
            "VersionExpired",
            "WaitTimeout",
            "WorkerFinished",
        ),
    },
}

# What a class shows beside what its bases show; the members of all others are those of its page in docs/api.md.
MEMBERS = {
    "tensorwire.Job": {
        *("name", "rank", "num_workers", "num_servers", "local_rank", "local_workers", "address", "routes"),
        *(
            "barrier",
            "broadcast",
            "all_reduce",
            "report",
            "uneven",
            "init_process_group",
            "close",
            "workers",
            "steps",
            "shard",
            "leave",
        ),
    },
    "tensorwire.torch.StoreOptimizer": {
        *(
            "step",
            "wait",
            "publish",
            "readers",
            "no_sync",
            "steps_taken",
            "write_parameters",
            "add_param_group",
            "state_dict",
            "load_state_dict",
        ),
        *("max_grad_norm", "error_if_nonfinite", "grad_norm", "summary", "count", "shared_state", "close"),
    },
}


def members(shown: type) -> set[str]:
    """The public names of a class and its bases of ours: those in their bodies, and attributes that methods assign."""
    ours = [each for each in shown.__mro__ if re.match(r"tensorwire\.(?!_native)", each.__module__)]
    assigned = {
        node.attr
        for each in ours
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each))))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return {name for name in assigned.union(*map(vars, ours)) if not name.startswith("_")}


@pytest.mark.parametrize("name", MEMBERS)
def test_public_members(name: str) -> None:
    module, _, shown = name.rpartition(".")
    assert members(getattr(importlib.import_module(module), shown)) == MEMBERS[name]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name: str) -> None:
    module = importlib.import_module(name)
    assert set(module.__all__) == PUBLIC[name]
    for public in module.__all__:
        assert hasattr(module, public)


def modules() -> list[Path]:
    return sorted(p for p in SOURCE.rglob("*.py"))


def all_modules() -> list[Path]:
    """With those of the benchmarks beside the package."""
    return [*modules(), *sorted(BENCHMARKS.rglob("*.py"))]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_every_public_thing_has_a_docstring() -> None:
    bare = []
    for path in all_modules():
        tree = tree_of(path)
        if ast.get_docstring(tree) is None:
            bare.append(str(path))
        if path.parent.name in ("conformance", "peers"):  # tests: their names say it; programs
            continue
        for node in ast.walk(tree):
            if not isinstance(node, (ast.ClassDef, ast.Module)):
                continue
            for child in node.body:
                kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
                if not isinstance(child, kinds) or child.name.startswith("_") or ast.get_docstring(child):
                    continue
                # An override says what its contract says; a private class's members are private.
                inherits = isinstance(node, ast.ClassDef) and (node.bases or node.name.startswith("_"))
                if not inherits:
                    bare.append(f"{path.name}: {child.name}")
    assert bare == []


def test_layers_import_only_downward() -> None:
    wrong = []
    for path in modules():
        layer = path.relative_to(SOURCE).parts[0]
        if layer not in LAYERS or path == SOURCE / "store" / "__init__.py":  # it names what users see, loaded late
            continue
        for name in re.findall(r"^\s*(?:from|import) tensorwire\.(\w+)", path.read_text(), re.M):
            if name in LAYERS and LAYERS.index(name) > LAYERS.index(layer):
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert wrong == []


def test_only_edges_write_and_signal() -> None:
    """Apart from what measures devices and looks whether they work."""
    measure = {"bench", "doctor", "testing", "device", "edge"}
    pattern = re.compile(r"channel\w*\.(?:write|signal|fetch_add|compare_swap)\(")
    above = [path for path in modules() if path.relative_to(SOURCE).parts[0] not in measure]
    assert [path.name for path in above if pattern.search(path.read_text())] == ["reach.py"]  # probes a route


def imported_by(name: str, seen: set[str]) -> set[str]:
    """The modules of ours that ``name`` imports, directly or through others, as their text says."""
    path = SOURCE.parent.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if name in seen or not path.exists():
        return seen
    seen.add(name)
    for found in re.findall(r"^\s*(?:from|import) (tensorwire[\w.]*)", path.read_text(), re.M):
        imported_by(found, seen)
    return seen


def test_a_server_imports_nothing_of_the_workers_side() -> None:
    found = imported_by("tensorwire.launch.server_process", set())
    assert "tensorwire.store.server_state" in found
    assert not found & {"tensorwire.store.store_client", "tensorwire.store.client_state"}


def test_the_package_does_without_the_benchmarks_beside_it() -> None:
    pattern = re.compile(r"^\s*(?:from|import) benchmarks\b|[\"']benchmarks\.", re.M)
    assert [path.name for path in modules() if pattern.search(path.read_text())] == []


def test_nothing_pickles_or_evaluates() -> None:
    wrong = []
    for path in all_modules():
        if path.name == "counting.py":  # counts pickles, makes none
            continue
        for line in path.read_text().splitlines():
            if re.search(r"^\s*(import|from) (pickle|marshal|shelve|dill)|(?<![.\w])(eval|exec)\(", line):
                wrong.append(f"{path.name}: {line.strip()}")
    assert wrong == []


# Words of an earlier vocabulary that no name may have again.
CUTE = {
    *("courier", "vigil", "doorman", "nursery", "party", "house", "homes", "tenant", "wandering", "vacate", "hollow"),
    *(
        "survey",
        "glance",
        "deathwatch",
        "pulse",
        "bury",
        "rescue",
        "pacing",
        "remains",
        "patiently",
        "hear",
        "elsewhere",
    ),
}


def test_no_two_modules_share_a_file_name() -> None:
    names = Counter(path.name for path in modules() if path.name not in ("__init__.py", "__main__.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_classes_share_a_name() -> None:
    """Apart from private ones, those of the conformance suite, which are tests, and what each framework has one of."""
    trees = [tree_of(path) for path in modules() if path.parent.name != "conformance"]
    found = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = Counter(name for name in found if name not in ("StoreEmbedding", "StoreOptimizer"))
    assert [name for name, count in names.items() if count > 1 and not name.startswith("_")] == []


def test_no_identifier_has_a_cute_word() -> None:
    found: dict[str, set[str]] = {}
    for path in all_modules():
        if path.parent.name == "conformance":
            continue
        with tokenize.open(path) as file:
            names = {one.string for one in tokenize.generate_tokens(file.readline) if one.type == tokenize.NAME}
        words = {word.lower() for name in names for word in re.findall("[A-Z]?[a-z]+", f"{path.stem} {name}")}
        for word in words & CUTE:
            found.setdefault(word, set()).add(path.name)
    assert found == {}


def test_files_stay_readable() -> None:
    long = [p.name for p in all_modules() if len(p.read_text().splitlines()) > 600]
    assert long == []


def test_importing_tensorwire_does_not_import_torch() -> None:
    code = "import sys, tensorwire; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_star_import_leaves_the_name_torch_alone() -> None:
    names: dict[str, object] = {}
    exec("import torch; stock = torch\nfrom tensorwire import *", names)
    assert names["torch"] is names["stock"]
    assert {"init", "Job"} <= names.keys()


def test_every_module_imports() -> None:
    # `make test-mxnet` and `make test-tensorflow` have them.
    left_out = tuple(f"tensorwire.{name}" for name in ("mxnet", "tensorflow") if not find_spec(name))
    for info in pkgutil.walk_packages(tensorwire.__path__, "tensorwire.", onerror=lambda _: None):
        if not info.name.endswith("__main__") and not info.name.startswith(left_out):
            assert inspect.ismodule(importlib.import_module(info.name))
