"""The example trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tensorwire.testing.patience import patient


def test_the_example_learns() -> None:
    script = Path(__file__).parents[2] / "examples/tensorflow_halves.py"
    command = [Path(sys.executable).parent / "tensorwire", "run", "--workers", "2", "--", sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(180.0))
    assert done.returncode == 0, done.stderr
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 50
