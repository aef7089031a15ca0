"""Fixtures of the tests of graphs."""

from collections.abc import Iterator

import pytest
import torch

from tests.fixtures import allocator_built as allocator_built
from tests.fixtures import sandbox as sandbox


@pytest.fixture(scope="session", autouse=True)
def built(allocator_built: None) -> None:
    """For all of them."""


@pytest.fixture
def fresh() -> Iterator[None]:
    """Seeded, and nothing is compiled before or kept afterwards."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
