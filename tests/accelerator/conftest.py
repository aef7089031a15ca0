"""The simulated accelerator is built before the first test that has it, whose time limit should not pay for that."""

from __future__ import annotations

import pytest

from tests.accelerator import simulated


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    if simulated.unavailable() is None:
        simulated.build()
