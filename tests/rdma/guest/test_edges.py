"""Edges over RDMA: the same tests as on the other devices, with a pair across the cable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.edge.edges import Pair
from tests.edge.test_checked import *  # noqa: F403
from tests.edge.test_static import *  # noqa: F403
from tests.rdma.devices import either


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends in this process."""
    with either() as a, either() as b, a.connect(b.address) as there, b.connect(a.address) as back:
        yield Pair(a, b, there, back)
