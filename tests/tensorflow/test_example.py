"""The examples train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.testing.patience import patient


@pytest.mark.parametrize(
    ("name", "servers"), [("tensorflow_halves.py", "0"), ("tensorflow_cut.py", "0"), ("tensorflow_servers.py", "2")]
)
def test_the_examples_learn(name: str, servers: str) -> None:
    script = Path(__file__).parents[2] / "examples" / name
    start = [Path(sys.executable).parent / "tensorwire", "run", "--workers", "2", "--servers", servers]
    done = subprocess.run(
        [*start, "--", sys.executable, script], capture_output=True, text=True, timeout=patient(180.0)
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 50


def test_the_example_of_fit_learns(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "tensorflow_fit.py"
    start = [Path(sys.executable).parent / "tensorwire", "run", "--workers", "2", "--servers", "1"]
    done = subprocess.run(
        [*start, "--", sys.executable, script], capture_output=True, text=True, timeout=patient(180.0), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    accuracy = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if "accuracy" in line]
    assert len(accuracy) == 6
    assert accuracy[-1] > 0.97
    assert not any(tmp_path.iterdir())


def test_the_example_of_embeddings_learns() -> None:
    script = Path(__file__).parents[2] / "examples" / "tensorflow_embedding.py"
    start = [Path(sys.executable).parent / "tensorwire", "run", "--workers", "2", "--servers", "2"]
    done = subprocess.run(
        [*start, "--", sys.executable, script], capture_output=True, text=True, timeout=patient(180.0)
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 20
