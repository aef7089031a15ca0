"""A server's threads for requests: one for each worker, whatever the number of stores."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from tensorwire.control import Member
from tensorwire.errors import PeerLost, ProtocolError, WaitTimeout
from tensorwire.store.request_link import DEPTH, Request, RequestInbox, RequestOperation
from tensorwire.store.request_store import RequestStore

_PATIENCE = 60.0  # between looks at the job while workers compute
_CREDIT = DEPTH // 4  # of so many requests, a worker hears of one at least


class RequestServer:
    """Takes each worker's requests, in their order, to the stores that they are for.

    Args:
        member: This server.
        workers: How many workers the job has.
        fail: What becomes of an error: it ends the job.
    """

    def __init__(self, member: Member, workers: int, fail: Callable[[BaseException], None]) -> None:
        self._member, self._workers, self._fail = member, workers, fail
        self._stores: dict[int, RequestStore] = {}
        self._ends: dict[int, Callable[[], None]] = {}
        self._open: dict[int, set[int]] = {}  # by store: workers that have not finished
        self._changed = threading.Condition()
        self._inboxes: list[RequestInbox] = []

    def begin(self) -> None:
        """Shows workers where their requests go; with the first store, before anything of it."""
        if not self._inboxes:
            self._inboxes = [RequestInbox(self._member, worker) for worker in range(self._workers)]
            for inbox in self._inboxes:
                name = f"requests of {inbox.name}"
                threading.Thread(target=self._run, args=(inbox,), name=name, daemon=True).start()

    def add(self, number: int, store: RequestStore, end: Callable[[], None]) -> None:
        """From now on requests for the store of that number are handled; ``end()``: when all workers have finished."""
        with self._changed:
            self._stores[number], self._ends[number] = store, end
            self._open[number] = set(range(self._workers))
            self._changed.notify_all()

    def store(self, number: int) -> RequestStore:
        """That of this number. Raises `ProtocolError` where there is none."""
        with self._changed:
            if number not in self._stores:
                raise ProtocolError(f"worker 0 names store {number}, which this server does not have")
            return self._stores[number]

    def _run(self, inbox: RequestInbox) -> None:
        try:
            inbox.open()
            for number in itertools.count(1):
                try:
                    request = self._receive(inbox, number)
                except PeerLost:
                    if self._has(inbox.worker):
                        raise
                    return  # it has finished everything, and left
                answered = self._handle(inbox.worker, request)
                if request.operation is RequestOperation.FINISH:
                    self._finish(request.store, inbox.worker)  # before the worker hears of it, and leaves the job
                if not answered or number % _CREDIT == 0:
                    inbox.release(number)
        except BaseException as error:
            self._fail(error)

    def _has(self, worker: int) -> bool:
        with self._changed:
            return any(worker in workers for workers in self._open.values())

    def _receive(self, inbox: RequestInbox, number: int) -> Request:
        while True:
            try:
                return inbox.receive(number, _PATIENCE)
            except WaitTimeout:
                self._member.check()

    def _handle(self, worker: int, request: Request) -> bool:
        store = self._stores.get(request.store)
        if store is None:
            store = self._wait_for(request.store)
        return store.handle(worker, request)

    def _wait_for(self, number: int) -> RequestStore:
        """The store, once it has been made: workers that are ready may be faster."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: number in self._stores, _PATIENCE):
                    return self._stores[number]
            self._member.check()

    def _finish(self, number: int, worker: int) -> None:
        """A worker has finished with a store."""
        with self._changed:
            self._open[number].discard(worker)
            if self._open[number]:
                return
            del self._open[number], self._stores[number]
            end = self._ends.pop(number)
        end()
