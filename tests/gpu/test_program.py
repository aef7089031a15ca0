"""The program says what it does, and that there is nothing to measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tensorwire.testing.patience import patient

ROOT = Path(__file__).parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(120.0),
    )


def test_help_names_the_parts() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(f"\n  {part:12}  " in done.stdout for part in ("registration", "bits", "step"))
    assert "--device sim --quick" in done.stdout


def test_without_the_accelerator_it_is_one_line() -> None:
    done = run("--device", "cuda" if torch.xpu.is_available() else "xpu")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("tests.gpu: PyTorch")
    assert done.stderr.count("\n") == 1
