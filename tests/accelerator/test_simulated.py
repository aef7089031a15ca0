"""The simulated accelerator computes what the CPU does, and has streams, events and memory as a real one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.accelerator.child import Results, cases_of

CASES = [(module, case) for module in ("training_cases", "device_cases", "torch_cases") for case in cases_of(module)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """Those of a module, which runs when they are first asked for."""
    return functools.cache(lambda module: Results(module, Path(tmp_path_factory.mktemp(module)) / "results"))


@pytest.mark.parametrize(("module", "case"), CASES)
def test_case(results: Callable[[str], Results], module: str, case: str) -> None:
    results(module).check(case)
