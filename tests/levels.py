"""Cases that take long: ``make test`` leaves them out; ``make test-all`` has slow, ``make test-long`` long ones.

A slow test holds a promise that no fast one does, once; what repeats a test with other cases is long.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def mostly_slow(cases: Sequence[Any], fast: Collection[Any]) -> list[Any]:
    """The cases as a parameter of a test, or as tuples of parameters; all but the ``fast`` ones are marked slow."""
    return [case if case in fast else _slow(case) for case in cases]


def mostly_long(cases: Sequence[Any], fast: Collection[Any]) -> list[Any]:
    """The cases as a parameter of a test, or as tuples of parameters; all but the ``fast`` ones are marked long."""
    return [case if case in fast else long(case) for case in cases]


def long(case: Any) -> Any:
    """The case, marked long."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
