"""The threads that talk to the servers: one begins requests, by priority, and one waits for their answers.

MXNet's engine hands requests over as gradients become ready; none of its threads waits here.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from queue import PriorityQueue, SimpleQueue
from typing import NamedTuple, Protocol

from tensorwire.mxnet.engine import Ended


class BegunRequest(Protocol):
    """A request that has begun."""

    def wait(self) -> object:
        """Returns when it is answered."""


class _Request(NamedTuple):
    urgency: int
    number: int
    begin: Callable[[], BegunRequest]
    begun: Callable[[BegunRequest], None]
    failed: Callable[[BaseException], None]


class KeyRequests:
    """Requests to the servers. The first error of one is kept, and ends it and all that follow at once."""

    def __init__(self) -> None:
        self._waiting: PriorityQueue[_Request] = PriorityQueue()
        self._begun: SimpleQueue[tuple[BegunRequest, Ended]] = SimpleQueue()
        self._numbers = itertools.count()
        self.error: BaseException | None = None
        self.turn = threading.Lock()  # for what must not come between options and a push
        for name, loop in (("requests", self._begin), ("answers", self._finish)):
            threading.Thread(target=loop, name=f"tensorwire mxnet {name}", daemon=True).start()

    def submit(self, begin: Callable[[], BegunRequest], ended: Ended, priority: int) -> None:
        """Calls ``begin`` in its turn, those of higher priority first, and ``ended`` when its answer has come."""
        self._submit(begin, lambda request: self._begun.put((request, ended)), ended, priority)

    def send(self, begin: Callable[[], BegunRequest], priority: int) -> SentRequest:
        """The same in two halves, which begin when the engine calls them: the request leaves, and is answered."""
        return SentRequest(self, begin, priority)

    def _submit(
        self,
        begin: Callable[[], BegunRequest],
        begun: Callable[[BegunRequest], None],
        failed: Callable[[BaseException], None],
        priority: int,
    ) -> None:
        self._waiting.put(_Request(-priority, next(self._numbers), begin, begun, failed))

    def check(self) -> None:
        """Raises the error of an earlier request."""
        if self.error is not None:
            raise self.error

    def _begin(self) -> None:
        while True:
            request = self._waiting.get()
            try:
                self.check()
                request.begun(request.begin())
            except BaseException as error:  # a reader of the array must not wait for ever
                self.error = self.error or error
                request.failed(self.error)

    def _finish(self) -> None:
        while True:
            answer, ended = self._begun.get()
            try:
                answer.wait()
            except BaseException as error:
                self.error = self.error or error
                ended(self.error)
            else:
                ended(None)


class SentRequest:
    """A request whose leaving and whose answer end two operations of the engine."""

    def __init__(self, requests: KeyRequests, begin: Callable[[], BegunRequest], priority: int) -> None:
        self._requests, self._begin, self._priority = requests, begin, priority
        self._request: BegunRequest | None = None

    def leave(self, ended: Ended) -> None:
        """Ends when the request has left."""

        def begun(request: BegunRequest) -> None:
            self._request = request
            ended(None)

        self._requests._submit(self._begin, begun, ended, self._priority)

    def finish(self, ended: Ended) -> None:
        """Ends when its answer has come; it begins after the request has left."""
        if self._request is None:  # it failed
            ended(self._requests.error)
        else:
            self._requests._begun.put((self._request, ended))
