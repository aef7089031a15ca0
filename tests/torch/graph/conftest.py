"""Fixtures of the tests of graphs."""

import pytest

from tests.fixtures import allocator_built as allocator_built
from tests.fixtures import sandbox as sandbox


@pytest.fixture(scope="session", autouse=True)
def built(allocator_built: None) -> None:
    """For all of them."""
