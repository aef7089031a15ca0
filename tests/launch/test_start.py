"""The processes that we start import nothing from the current folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tensorwire
from tensorwire.launch.children import Child
from tensorwire.launch.start import module_command
from tensorwire.launch.stops import is_stopped
from tests.harness.sandbox import Sandbox

TRAINS = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("trained")
"""
ADDS = """
from tensorwire.store import KeyValue
import numpy
kv = KeyValue(rule="sum")
kv.init("a", numpy.zeros(3, "f4"))
kv.push("a", numpy.ones(3, "f4")).wait()
print("trained")
"""


def trap(sandbox: Sandbox, *names: str) -> Path:
    """A folder with modules that end whoever imports them."""
    folder = sandbox.folder / "trap"
    folder.mkdir()
    for name in names:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder ran')\n")
    return folder


@pytest.mark.parametrize(
    ("launcher", "safe_path", "body"),
    [
        ("run", "", ADDS),
        *(pytest.param(*case, TRAINS, marks=pytest.mark.slow) for case in (("run", "1"), ("alone", ""))),
    ],
    ids=["run", "run with PYTHONSAFEPATH", "alone"],
)
def test_no_process_of_a_job_imports_from_the_current_folder(
    sandbox: Sandbox, launcher: str, safe_path: str, body: str
) -> None:
    folder = trap(sandbox, "msgspec", "numbers", "queue", "torch", "tensorwire")
    script = sandbox.script(body)
    command = f"{sys.executable} {script}"
    if launcher == "run":
        command = f"{Path(sys.executable).parent}/tensorwire run --workers 2 -- {command}"
    result = sandbox.start("sh", "-c", f"cd {folder} && exec {command}", PYTHONSAFEPATH=safe_path).finish()
    assert (result.status, result.err) == (0, "")
    assert "trained" in result.out
    sandbox.nothing_left()


def test_the_users_pythonpath_counts(sandbox: Sandbox) -> None:
    folder = trap(sandbox, "msgspec")
    result = sandbox.python(sandbox.script(""), PYTHONPATH=str(folder)).finish()
    assert result.status == 1
    assert "msgspec of the current folder ran" in result.err


@pytest.mark.parametrize("flag", [(), ("-P",)] if sys.version_info >= (3, 11) else [()])
def test_a_module_finds_its_arguments_and_no_folder_of_ours(tmp_path: Path, flag: tuple[str, ...]) -> None:
    code = "import sys\nprint(__name__, sys.argv[1:], [p for p in sys.path if not p or p.endswith('/launch')])"
    (tmp_path / "program.py").write_text(code)
    python, *command = module_command("program", 1, "two")
    done = subprocess.run(
        [python, *flag, *command], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "__main__ ['1', 'two'] []"


def test_no_program_is_started_by_a_way_that_imports_from_the_current_folder() -> None:
    programs = [p for p in Path(tensorwire.__file__).parent.rglob("*.py") if p.parent.name != "conformance"]
    assert [p.name for p in programs if re.search(r"sys\.executable,\s*\"-[mc]\"", p.read_text())] == []


def test_a_stopped_child_is_not_waited_for() -> None:
    """It cannot leave, and what remains of a job is not to stay for as long as one may take."""
    child = Child("tensorwire.launch.guard", environment=os.environ)
    os.kill(child.process.pid, signal.SIGSTOP)
    while not is_stopped(child.process.pid):
        pass
    child.close(1e6)
    assert child.process.returncode == -signal.SIGKILL
