"""The full example: interrupted and resumed it has the bits of a training that was not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures import sandbox as sandbox
from tests.harness.sandbox import PROGRESS, Program, Result, Sandbox

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_full.py"
EPOCHS = "4"
DIES = """
import os, runpy, sys
import torch
import tensorwire as tw

def dying(call, rank, at):
    calls = 0
    def wrapped(*args, **options):
        nonlocal calls
        calls += 1
        if calls == at and os.environ["TENSORWIRE_RANK"] == rank:
            if call is torch.save:
                args[1].write(b"half of it")
                args[1].flush()
            os.kill(os.getpid(), 9)
        return call(*args, **options)
    return wrapped

if sys.argv[1] == "step":
    tw.torch.StoreOptimizer.step = dying(tw.torch.StoreOptimizer.step, "1", 2 * 21 + 10)
else:
    torch.save = dying(torch.save, "0", 6)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def train(sandbox: Sandbox, folder: Path, *options: str, run: tuple[str, ...] = (), dies: str = "") -> Result:
    command = [sys.executable, "-W", "error"]
    if dies:
        (sandbox.folder / "dies.py").write_text(DIES)
        command += [str(sandbox.folder / "dies.py"), dies]
    command += [str(EXAMPLE), "--folder", str(folder), "--epochs", EPOCHS, *options]
    program: Program = sandbox.launch("run", "--workers", "2", *run, "--", *command, OMP_NUM_THREADS="1")
    return program.finish()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The last checkpoint of a training that nothing interrupted."""
    sandbox = Sandbox(tmp_path_factory.mktemp("whole"))
    try:
        result = train(sandbox, sandbox.folder / "run")
        assert (result.status, result.err) == (0, "")
        losses = [float(loss) for loss in re.findall(r"validation loss ([\d.]+), acc", result.out)]
        assert len(losses) == int(EPOCHS)
        assert losses[-1] < losses[0]
        sandbox.nothing_left()
        return read(sandbox.folder / "run")
    finally:
        sandbox.close()


@pytest.mark.parametrize(
    ("dies", "resumed"),
    [
        pytest.param("saving", ("--servers", "1", "--device", "tcp"), marks=pytest.mark.slow),
        pytest.param("step", ("--servers", "2"), marks=pytest.mark.long),
    ],
)
def test_a_killed_training_goes_on_with_the_same_bits(
    sandbox: Sandbox, whole: dict[str, Any], dies: str, resumed: tuple[str, ...]
) -> None:
    folder = sandbox.folder / "run"
    killed = train(sandbox, folder, dies=dies)
    assert killed.status == 137
    assert read(folder)["epoch"] == 2
    result = train(sandbox, folder, run=resumed)
    assert (result.status, result.err) == (0, "")
    assert "resumed after epoch 2" in result.out
    assert same(read(folder), whole)
    assert len(whole["random"]) == 2
    assert not torch.equal(*whole["random"])  # each worker has dropout masks of its own
    sandbox.nothing_left()


@pytest.mark.slow
def test_early_stopping_ends_all_workers_and_holds_when_resumed(sandbox: Sandbox, whole: dict[str, Any]) -> None:
    folder = sandbox.folder / "run"
    folder.mkdir()
    torch.save({**whole, "epoch": 2, "stale": 2, "best": 0.0}, folder / "checkpoint.pt")
    result = train(sandbox, folder, "--patience", "3")
    assert (result.status, result.err) == (0, "")
    assert "resumed after epoch 2" in result.out
    assert (read(folder)["epoch"], read(folder)["stale"]) == (3, 3)
    again = train(sandbox, folder, "--patience", "3")
    assert (again.status, again.err) == (0, "")
    assert "resumed after epoch 3\nbest validation loss 0.0000" in again.out
    sandbox.nothing_left()


@pytest.mark.slow
def test_a_checkpoint_of_another_number_of_workers_is_refused(sandbox: Sandbox, whole: dict[str, Any]) -> None:
    folder = sandbox.folder / "run"
    folder.mkdir()
    torch.save({**whole, "random": whole["random"] * 2}, folder / "checkpoint.pt")
    result = train(sandbox, folder)
    assert result.status == 1
    assert "raised ValueError: this checkpoint is of 4 workers: start as many" in result.message().splitlines()[0]
    sandbox.nothing_left()


@pytest.mark.slow
def test_it_runs_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLE), "--folder", str(tmp_path / "run"), "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, PROGRESS.sub("", done.stderr)) == (0, "")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["best.pt", "checkpoint.pt"]


def test_the_documentation_shows_the_example() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "from-ddp.md").read_text()
    section = page.partition("## A whole training\n")[2].partition("\n## ")[0]
    excerpts = re.findall(r"```py\n(.*?)```", section, re.S)
    assert len(excerpts) >= 6
    assert [excerpt for excerpt in excerpts if excerpt not in EXAMPLE.read_text()] == []
