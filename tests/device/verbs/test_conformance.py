"""The verbs device keeps the contract of devices, as far as one process and a NIC in software can show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.testing.patience import patient

ROOT = Path(__file__).parents[3]


QUICK = "atomics or closing or connecting or operands or order or refusals or transfers or waiting"


@pytest.mark.parametrize(
    "tests", [pytest.param(QUICK, marks=pytest.mark.slow), pytest.param(f"not ({QUICK})", marks=pytest.mark.long)]
)
def test_the_conformance_suite(tests: str) -> None:
    command = [sys.executable, "-m", "tensorwire.testing", "tests.harness.fake_nic:VerbsInProcess", "-x", "-k", tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(240), check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
