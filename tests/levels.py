"""Cases that take long: ``make test`` leaves out those marked slow, ``make test-all`` has them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def mostly_slow(cases: Sequence[Any], fast: Collection[Any]) -> list[Any]:
    """The cases as a parameter of a test, or as tuples of parameters; all but the ``fast`` ones are marked slow."""
    return [case if case in fast else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
