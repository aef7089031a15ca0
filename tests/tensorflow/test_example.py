"""The examples train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.testing.patience import patient


def learns(name: str, servers: int, told: str, folder: Path) -> list[float]:
    """The numbers after a word, epoch by epoch; nothing stays in the folder."""
    script = Path(__file__).parents[2] / "examples" / name
    start = [Path(sys.executable).parent / "tensorwire", "run", "--workers", "2", "--servers", str(servers)]
    done = subprocess.run(
        [*start, "--", sys.executable, script], capture_output=True, text=True, timeout=patient(180.0), cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert not any(folder.iterdir())
    return [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if told in line]


@pytest.mark.parametrize(
    ("name", "servers", "part"),
    [
        ("tensorflow_halves.py", 0, 50),
        ("tensorflow_cut.py", 0, 50),
        ("tensorflow_servers.py", 2, 50),
        ("tensorflow_embedding.py", 2, 20),
    ],
)
def test_the_examples_learn(name: str, servers: int, part: int, tmp_path: Path) -> None:
    losses = learns(name, servers, "loss", tmp_path)
    assert len(losses) == 5
    assert losses[-1] < losses[0] / part


def test_the_example_of_fit_learns(tmp_path: Path) -> None:
    accuracy = learns("tensorflow_fit.py", 1, "accuracy", tmp_path)
    assert len(accuracy) == 6
    assert accuracy[-1] > 0.97
