"""Fixtures of the control layer's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tensorwire.control import Client, Coordinator
from tests.fixtures import sandbox as sandbox
from tests.harness.sandbox import nothing_kept

SECRET = b"a secret of the tests"


class Jobs:
    """Coordinators and clients of one test; closed at its end."""

    def __init__(self) -> None:
        self._open: list[Client | Coordinator] = []

    def coordinator(self, workers: int = 2, servers: int = 1, **options: object) -> Coordinator:
        """A coordinator in this process."""
        made = Coordinator(SECRET, workers=workers, servers=servers, **options)  # type: ignore[arg-type]
        self._open.append(made)
        return made

    def client(self, address: str | Coordinator, role: str = "worker", index: int = 0, **options: object) -> Client:
        """A member in this process."""
        address = address if isinstance(address, str) else address.address
        made = Client(address, SECRET, role, index, **options)  # type: ignore[arg-type]
        self._open.append(made)
        return made

    def close(self) -> None:
        """Closes all, members first."""
        for one in reversed(self._open):
            one.close()


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    """Coordinators and members; afterwards no thread and no descriptor is left."""
    with nothing_kept():
        made = Jobs()
        yield made
        made.close()


@pytest.fixture
def seen() -> tuple[list[object], Callable[[object], None]]:
    """A list, and the call that appends to it."""
    calls: list[object] = []
    return calls, calls.append
