"""Fixtures of the benchmark's tests."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures import sandbox as sandbox


@pytest.fixture
def only_link() -> Iterator[None]:
    """No other test makes a link meanwhile: that changes, for a moment, a setting of the whole machine."""
    with Path(__file__).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
