"""The simulated accelerator computes what the CPU does, has streams, events and memory as a real one, and shows waits
that are left out.
"""

from __future__ import annotations

import pytest

from tests.accelerator.child import Results, cases_of

MODULES = ("training_cases", "device_cases", "torch_cases", "wait_cases")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(MODULES, tmp_path_factory.mktemp("cases") / "results")


@pytest.mark.parametrize(("module", "case"), [(module, case) for module in MODULES for case in cases_of(module)])
def test_case(results: Results, module: str, case: str) -> None:
    results.check(module, case)
