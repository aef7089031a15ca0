"""The second guest, for every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener
from typing import Any

import pytest

from tensorwire.testing.patience import patient
from tests.rdma.two.agent import KEY, PORT
from tests.rdma.two.roles import warm
from tests.rdma.wire import FAR

ANSWER_SECONDS = patient(240.0)  # only a guard


class Far:
    """The second guest. Its methods are those of ``Agent``."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._calls = pipe, 0

    def start(self, name: str, *arguments: Any) -> None:
        """Begins a call. The answer to an earlier one that nobody waited for is none to this one."""
        self._calls += 1
        self._pipe.send((self._calls, name, arguments))

    def finish(self) -> Any:
        """What it returned. Fails with what it raised."""
        number = 0
        while number < self._calls:
            assert self._pipe.poll(ANSWER_SECONDS), "the second guest does not answer"
            number, kind, value = self._pipe.recv()
        assert kind == "returned", value
        return value

    def call(self, name: str, *arguments: Any) -> Any:
        """``start``, then ``finish``."""
        self.start(name, *arguments)
        return self.finish()


@pytest.fixture(scope="session")
def far() -> Iterator[Far]:
    """The second guest, when it has booted."""
    with Listener((FAR[0], PORT), authkey=KEY) as listener, listener.accept() as pipe:
        yield Far(pipe)


@pytest.fixture(scope="session")
def warmed(far: Far) -> None:
    """Both guests have imported torch."""
    far.start("warm")
    warm()
    far.finish()
