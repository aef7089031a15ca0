"""The example trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.testing.patience import patient

DATA = Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.skipif(not DATA.is_dir(), reason="there is no Fashion-MNIST: apt-get install dataset-fashion-mnist")
def test_the_example_learns() -> None:
    here = Path(sys.executable).parent
    script = Path(__file__).parents[2] / "examples/mxnet_mnist.py"
    options = ["run", "--workers", "2", "--servers", "1", "--"]
    command = [here / "tensorwire", *options, sys.executable, script, "--steps", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(180.0))
    assert done.returncode == 0, done.stderr
    words, _, accuracy = done.stdout.rpartition("test accuracy: ")
    assert "workers: 2" in words
    assert float(accuracy) > 0.7
