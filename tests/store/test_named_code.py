"""Code that servers run is named by worker 0 alone, and compared before anything of it is imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensorwire as tw
from tensorwire.errors import PlanMismatch, Unsupported
from tensorwire.launch.worker import current_worker
from tensorwire.store.admission import check_versions, versions
from tensorwire.store.foreign import load_rule, named_by
from tensorwire.store.rule_names import hashes_of
from tensorwire.store.sharding import ParameterSpec
from tensorwire.store.store_layout import StoreSpec
from tests.harness.jobs import run_job

RULE = """
with open({mark!r}, "a") as mark:
    mark.write(__name__ + " ")
def update(parameter, gradient, state, options):
    parameter -= 1000
update.numpy = True
update.imports = lambda options: [options["driven"]] if "driven" in options else []
"""
DRIVEN = """
with open({mark!r}, "a") as mark:
    mark.write(__name__ + " ")
class Driven: ...
"""


class Code:
    """A package with a rule, and a module with a class that the rule drives."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, folder / "imported"
        self.package = f"rules_{secrets.token_hex(4)}"
        (folder / self.package).mkdir()
        self.write("__init__", "")
        self.write("rule", RULE)
        self.write("driven", DRIVEN)
        self.rule, self.driven = f"{self.package}.rule:update", f"{self.package}.driven:Driven"

    def write(self, module: str, text: str) -> None:
        (self.folder / self.package / f"{module}.py").write_text(text.format(mark=str(self.mark)))

    @property
    def imported(self) -> str:
        """The modules that were, in order."""
        return self.mark.read_text().replace(f"{self.package}.", "").strip() if self.mark.exists() else ""


@pytest.fixture
def code(tmp_path: Path) -> Iterator[Code]:
    """It is gone from this process afterwards."""
    before = list(sys.path)
    code = Code(tmp_path)
    importlib.invalidate_caches()
    yield code
    sys.path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == code.package]:
        del sys.modules[name]


def seen_by_worker(code: Code) -> dict[str, str]:
    """The hashes that a worker sends, which has the code and imports none of it."""
    sys.path.insert(0, str(code.folder))
    try:
        sources: dict[str, str] = named_by(code.rule, {})["sources"]
        return {**sources, **hashes_of([code.driven.partition(":")[0]])}
    finally:
        del sys.path[0]


def test_a_server_imports_what_is_the_same(code: Code) -> None:
    sources = seen_by_worker(code)
    assert sorted(sources) == [code.package, f"{code.package}.driven", f"{code.package}.rule"]
    found = load_rule(code.rule, [str(code.folder)], sources, {"driven": code.driven})
    assert found.__name__ == "update"
    assert code.imported == "rule driven"


@pytest.mark.parametrize("changed", ["__init__", "rule", "driven"])
def test_nothing_is_imported_where_one_file_differs(code: Code, changed: str) -> None:
    sources = seen_by_worker(code)
    text = (code.folder / code.package / f"{changed}.py").read_text()
    code.write(changed, f"{text}# changed\n")
    name = code.package if changed == "__init__" else f"{code.package}.{changed}"
    with pytest.raises(
        PlanMismatch, match=f"on the server is not the {name} that workers have: install one everywhere"
    ):
        load_rule(code.rule, [str(code.folder)], sources, {"driven": code.driven})
    assert code.imported == ""


def test_nothing_is_imported_where_a_file_is_missing(code: Code) -> None:
    sources = seen_by_worker(code)
    (code.folder / code.package / "driven.py").unlink()
    with pytest.raises(Unsupported, match=f"No module named '{code.package}.driven'.*: install that module"):
        load_rule(code.rule, [str(code.folder)], sources, {"driven": code.driven})
    assert code.imported == ""


def test_a_rule_drives_no_class_that_worker_0_did_not_name(code: Code) -> None:
    sources = seen_by_worker(code)
    del sources[f"{code.package}.driven"]
    with pytest.raises(Unsupported, match=r"worker 0 has not said which file .*driven is: servers do not import it"):
        load_rule(code.rule, [str(code.folder)], sources, {"driven": code.driven})
    assert code.imported == "rule"


def test_a_module_that_is_there_already_is_compared_with_its_file(code: Code) -> None:
    sources = seen_by_worker(code)
    load_rule(code.rule, [str(code.folder)], sources)
    with pytest.raises(PlanMismatch, match="is not the"):
        load_rule(code.rule, [], {**sources, f"{code.package}.rule": "0" * 64})


def intrude(job: tw.Job, folder: str, rule: str, mark: str) -> None:
    """Worker 1 says in place of worker 0 what the first store is; until the job ends, or the server has imported."""
    ended = current_worker().member.client.ended
    if job.rank == 1:
        tensors = [ParameterSpec("k", (4,), "float32")]
        spec = StoreSpec(versions(), tensors, rule, [{}], [], 4 << 20, False, "sum", keys=True, folders=[folder])
        current_worker().member.client.publish("store/0", spec.encoded())
    while not ended.wait(0.02) and not Path(mark).exists():
        pass


def test_only_worker_0_names_code(code: Code) -> None:
    cause = run_job(intrude, str(code.folder), code.rule, str(code.mark)).cause
    assert code.imported == ""
    assert str(cause) == "server 0 stopped: 'store/0' was published by worker 1, which only worker 0 may do"


def test_versions_of_an_adapters_framework_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.partition(" ")[0] for each in versions().split(", ")] == ["tensorwire", "numpy", "torch"]
    installed = {"mxnet": "1.9.1", "tensorflow": "2.21.0", "keras": "3.12.0"}
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed.get(name) or version(name))
    for adapter, package in (("mxnet", "mxnet"), ("tensorflow", "tensorflow"), ("tensorflow", "keras")):
        rule = f"tensorwire.{adapter}.rules:update"
        workers = versions(rule)
        check_versions(workers, rule, "server 0")
        monkeypatch.setitem(installed, package, "0.1")
        with pytest.raises(PlanMismatch, match=f"{package} 0.1.*: install one everywhere"):
            check_versions(workers, rule, "server 0")
