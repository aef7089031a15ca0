"""A server's threads for requests: one for each worker, whatever the number of stores."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from functools import partial

from tensorwire.control import Member
from tensorwire.errors import PeerLost, ProtocolError
from tensorwire.store.request_link import DEPTH, Request, RequestInbox, RequestOperation
from tensorwire.store.request_store import RequestStore

_PATIENCE = 60.0  # between looks at the job while workers compute
_CREDIT = DEPTH // 4  # of so many requests, a worker hears of one at least


class RequestServer:
    """Takes each worker's requests, in their order, to the stores that they are for.

    Args:
        member: This server.
        fail: What becomes of an error: it ends the job.
    """

    def __init__(self, member: Member, fail: Callable[[BaseException], None]) -> None:
        self._member, self._fail = member, fail
        self._stores: dict[int, RequestStore] = {}
        self._ends: dict[int, Callable[[], None]] = {}
        self._open: dict[int, set[int]] = {}  # by store: workers that have not finished
        self._lost: set[tuple[int, int]] = set()  # ranks and incarnations
        self._changed = threading.Condition()
        self._inboxes: dict[int, RequestInbox] = {}

    def begin(self) -> None:
        """Shows workers where their requests go; with the first store, before anything of it."""
        if not self._inboxes:
            for rank, incarnation in self._member.membership.workers.items():
                self._open_inbox(rank, incarnation)

    def _open_inbox(self, rank: int, incarnation: int) -> None:
        self._inboxes[rank] = inbox = RequestInbox(self._member, rank, incarnation)
        threading.Thread(target=self._run, args=(inbox,), name=f"requests of {inbox.name}", daemon=True).start()

    def add(self, number: int, store: RequestStore, end: Callable[[], None]) -> None:
        """From now on requests for the store of that number are handled; ``end()``: when all workers have finished."""
        with self._changed:
            self._stores[number], self._ends[number] = store, end
            self._open[number] = set(store.peers)
            here = {(rank, peer.incarnation) for rank, peer in store.peers.items()}
            inboxes = [(rank, inbox.incarnation) for rank, inbox in self._inboxes.items()]
            lost = [rank for rank, incarnation in self._lost & here]
            self._changed.notify_all()
        for worker in lost:  # while the store was made
            self._lose_in(number, store, worker)
        for rank, incarnation in inboxes:
            if (rank, incarnation) not in here | self._lost:  # it joined while the store was made
                name = f"admission of worker {rank}"
                arguments = (number, store, rank, incarnation)
                threading.Thread(target=self._admit_to, args=arguments, name=name, daemon=True).start()

    # ---- workers that join

    def incarnation(self, rank: int) -> int | None:
        """That of the worker of a rank whose requests are handled."""
        if not self._inboxes:
            return self._member.membership.workers.get(rank)
        return self._inboxes[rank].incarnation if rank in self._inboxes else None

    def admit(self, rank: int, incarnation: int) -> None:
        """Lets a worker join, and all stores one after the other, as it comes to them. Raises what ends the job."""
        with self._changed:
            self._open_inbox(rank, incarnation)
            stores = sorted(self._stores.items())
        for number, store in stores:
            self._admit_to(number, store, rank, incarnation)

    def _admit_to(self, number: int, store: RequestStore, rank: int, incarnation: int) -> None:
        with self._changed:
            if number not in self._open:
                return
            self._open[number].add(rank)
        try:
            store.admit(rank, incarnation)
        except PeerLost as error:
            self._member.await_loss(rank, error)
            self._finish(number, rank)
        except BaseException as error:
            self._fail(error)
        with self._changed:
            self._changed.notify_all()

    def store(self, number: int) -> RequestStore:
        """That of this number. Raises `ProtocolError` where there is none."""
        with self._changed:
            if number not in self._stores:
                raise ProtocolError(f"worker 0 names store {number}, which this server does not have")
            return self._stores[number]

    def _run(self, inbox: RequestInbox) -> None:
        try:
            try:
                self._member.outwait(lambda _: inbox.open())
            except PeerLost as error:
                self._lose(inbox, error)
                return
            for number in itertools.count(1):
                try:
                    request = self._member.outwait(partial(inbox.receive, number))
                except PeerLost as error:
                    self._lose(inbox, error)
                    return
                answered = self._handle(inbox, request)
                if request.operation is RequestOperation.FINISH:
                    self._finish(request.store, inbox.worker)  # before the worker hears of it, and leaves the job
                if not answered or number % _CREDIT == 0:
                    with contextlib.suppress(PeerLost):  # there may be more requests, and after the last one it shows
                        inbox.release(number)
        except BaseException as error:
            self._fail(error)

    def _lose(self, inbox: RequestInbox, error: PeerLost) -> None:
        """The channel to a worker has ended, and all that it had asked was looked at."""
        worker = inbox.worker
        if self._stores_of(worker):  # else it has finished everything, and left
            self._member.await_loss(worker, error)
            with self._changed:
                self._lost.add((worker, inbox.incarnation))
            for number, store in self._stores_of(worker):
                if store.incarnation(worker) == inbox.incarnation:  # else it has not come to that store
                    self._lose_in(number, store, worker)

    def _lose_in(self, number: int, store: RequestStore, worker: int) -> None:
        store.lose(worker)
        store.fates.gave_up(worker, store.peers[worker].incarnation)
        self._finish(number, worker)

    def _stores_of(self, worker: int) -> list[tuple[int, RequestStore]]:
        """Those that it has not finished with."""
        with self._changed:
            return [(number, self._stores[number]) for number, workers in self._open.items() if worker in workers]

    def _handle(self, inbox: RequestInbox, request: Request) -> bool:
        store = self._stores.get(request.store)
        if store is None or store.incarnation(inbox.worker) != inbox.incarnation:
            store = self._wait_for(request.store, inbox)
        return store.handle(inbox.worker, request)

    def _wait_for(self, number: int, inbox: RequestInbox) -> RequestStore:
        """The store, once it has been made, and has let the worker in: workers that are ready may be faster."""

        def knows() -> bool:
            store = self._stores.get(number)
            return store is not None and store.incarnation(inbox.worker) == inbox.incarnation

        while True:
            with self._changed:
                if self._changed.wait_for(knows, _PATIENCE):
                    return self._stores[number]
            self._member.check()

    def _finish(self, number: int, worker: int) -> None:
        """A worker has finished with a store, or is lost to it."""
        with self._changed:
            if worker not in self._open.get(number, ()):
                return
            self._open[number].discard(worker)
            if self._open[number]:
                return
            del self._open[number], self._stores[number]
            end = self._ends.pop(number)
        end()
