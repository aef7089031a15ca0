"""The pair that tests of edges run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.edge.edges import KINDS, Pair


@pytest.fixture(params=list(KINDS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Both ends in this process, on every device."""
    a, b = KINDS[request.param](), KINDS[request.param]()
    yield Pair(a, b, a.connect(b.address), b.connect(a.address))
    a.close()
    b.close()
