"""A wait that a program leaves out shows on the simulated accelerator, and nothing is wrong with the wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator.child import Results, cases_of

CASES = cases_of("wait_cases")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results("wait_cases", Path(tmp_path_factory.mktemp("waits")) / "results")


@pytest.mark.parametrize("case", CASES)
def test_waits(results: Results, case: str) -> None:
    results.check(case)
