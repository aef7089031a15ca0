"""A worker's side of a table of rows. Imports no framework. One thread at a time may use it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from tensorwire.control import Member
from tensorwire.edge import Consumer, Word
from tensorwire.errors import ProtocolError
from tensorwire.observe import counters
from tensorwire.store.endpoints import show
from tensorwire.store.request_client import RequestClient
from tensorwire.store.request_link import WORD, RequestOperation, StoreRequests
from tensorwire.store.row_layout import ANSWERS, DEPTH, Array, RowPlaces, divide
from tensorwire.store.sharding import StorePlan
from tensorwire.store.store_layout import StoreSpec

_NONE = np.empty(0, np.int64)


class RowClient(RequestClient):
    """One worker's end of the table ``name``. All workers have to `agree` on it before.

    Numbers of rows are unique, in ascending order, and within the table: callers see to that.
    """

    def __init__(self, member: Member, name: str, spec: StoreSpec, plan: StorePlan) -> None:
        super().__init__(member, name, spec, plan)
        self.starts = divide(spec.tensors[0].shape[0], plan.servers)
        self.servers: list[_Server] = [_Server(self, server) for server in range(plan.servers)]
        self._unread: list[tuple[_Server, int]] = []  # where changes were asked for, and their first rows

    def _parts(self, indices: Array) -> Iterator[tuple[_Server, slice]]:
        """Each server, and which of the rows are on it."""
        cuts = np.searchsorted(indices, self.starts)
        for server, start, stop in zip(self.servers, cuts, cuts[1:], strict=False):
            yield server, slice(int(start), int(stop))

    def push(self, indices: Array, rows: Array, options: bytes) -> list[int]:
        """Contributes rows, on every server. Returns the number of the last request to each: see `applied`."""
        for server in self.servers:
            server.wait_for_room()
        with self._unit("a push"):
            parts = self._parts(indices)
            numbers = [server.ask_for(RequestOperation.PUSH, indices[at], rows[at], options) for server, at in parts]
            self.produced += 1
        counters.add(pushes=len(numbers))
        return numbers

    def _unit(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self.course.unit(f"{what} of rows of {self.spec.tensors[0].name}")

    def applied(self, numbers: Sequence[int]) -> bool:
        """Whether the servers have done the requests of these numbers."""
        return all(server.done.value >= number for server, number in zip(self.servers, numbers, strict=True))

    def wait_applied(self, numbers: Sequence[int], timeout: float | None = None) -> None:
        """Returns when they have. Raises `PeerLost` or `WaitTimeout`."""
        seconds = self.timeout if timeout is None else timeout
        for server, number in zip(self.servers, numbers, strict=True):
            self.member.wait(partial(server.done.wait, number), seconds, self.place)

    def ask(self, indices: Array, options: bytes) -> None:
        """Asks for rows; `take` has to follow before the next `ask`."""
        with self._unit("a pull"):
            for server, at in self._parts(indices):
                server.ask(indices[at], options)

    def ready(self, indices: Array) -> bool:
        """Whether the first answers to `ask` are there."""
        return all(at.start == at.stop or server.answer_is_there for server, at in self._parts(indices))

    def wait_ready(self, indices: Array, timeout: float | None = None) -> None:
        """Returns when they are. Raises `PeerLost` or `WaitTimeout`."""
        for server, at in self._parts(indices):
            if at.start < at.stop:
                server.wait_for_answer(self.timeout if timeout is None else timeout)

    def take(self, indices: Array, out: Array, options: bytes, timeout: float | None = None) -> None:
        """Copies the rows that `ask` asked for into ``out``. Raises `PeerLost`, or `WaitTimeout`; then call again."""
        for server, at in self._parts(indices):
            server.take(indices[at], out[at], options, self.timeout if timeout is None else timeout)

    def changes(self, options: bytes) -> Iterator[tuple[Array, Array]]:
        """Numbers and rows that have changed since the last call; the memory is valid until the next are asked for.

        Where a call was interrupted, the next one goes on from what it gave last.
        """
        if not self._unread:
            with self._unit("a pull"):
                for server in self.servers:
                    server.ask_for(RequestOperation.CHANGES, _NONE, None, options)
                self._unread = list(zip(self.servers, self.starts, strict=False))
        while self._unread:
            server, start = self._unread[0]
            indices, rows, more = server.changes(self.timeout)
            yield indices.astype(np.int64) + start, rows
            if more:
                with self._unit("a pull"):
                    server.ask_for(RequestOperation.CHANGES, _NONE, None, options)
            else:
                del self._unread[0]

    def assign(self, indices: Array, rows: Array, options: bytes) -> None:
        """Worker 0: these rows become the values. Returns when they are."""
        with self._unit("setting"):
            parts = self._parts(indices)
            numbers = [server.ask_for(RequestOperation.ASSIGN, indices[at], rows[at], options) for server, at in parts]
            self.wait_applied(numbers)


class _Server(StoreRequests):
    """What this worker shares with one server: places for rows there, words and places of answers here."""

    def __init__(self, client: RowClient, index: int) -> None:
        spec, member = client.spec, client.member
        assert spec.table is not None
        super().__init__(member, client.name, client.links[index], 0, client.timeout)
        self._client: RowClient = weakref.proxy(client)  # which has this
        self._first = client.starts[index]
        device, tensor = self.channel.device, spec.tensors[0]
        self._places = places = RowPlaces(spec.table.most, tensor.shape[1:], tensor.dtype)
        # Where the server's memory cannot be mapped, what is to be there is put together in ours.
        self._staging = None if self.mapped else client.allocate(device, DEPTH * places.nbytes)
        self._rows = memoryview(self.mapped or self._staging)  # type: ignore[arg-type]
        self._own = own = client.allocate(device, 2 * WORD + ANSWERS * places.nbytes)
        self.done = Word(own, 0, self.channel)
        self._arrived = Word(own, WORD, self.channel)
        answers = memoryview(own)[2 * WORD :]
        slots = [answers[n * places.nbytes : (n + 1) * places.nbytes] for n in range(ANSWERS)]
        self._answers = Consumer(self._arrived, slots=slots)
        self._number = self._asked = 0  # requests for the table, and those that are answered
        self._next = 1  # the answer that is to be read
        self._wanted = self._taken = 0  # of the rows of a pull: those that were asked for, and those that were read
        show(member, client.name, self.name, own)

    def wait_for_room(self) -> None:
        """Returns when the server takes a request. Raises `PeerLost` or `WaitTimeout`."""
        if self._number >= DEPTH:
            self.done.wait(self._number + 1 - DEPTH, self._timeout)

    def announce(self, operation: RequestOperation, options: bytes) -> int:
        return self.ask_for(operation, _NONE, None, options)

    def wait_until_finished(self, timeout: float) -> None:
        self.done.wait(self._number, timeout)
        super().wait_until_finished(timeout)

    def ask_for(self, operation: RequestOperation, indices: Array, rows: Array | None, options: bytes) -> int:
        """Sends a request, in as many parts as it takes, and returns the number of the last."""
        most, start = self._places.most, 0
        self._asked += operation in (RequestOperation.PULL, RequestOperation.CHANGES)
        while True:
            stop = min(len(indices), start + most)
            self.wait_for_room()
            self._number += 1
            part = None if rows is None else rows[start:stop]
            self._send_part(operation, indices[start:stop], part, options, stop < len(indices))
            if stop == len(indices):
                return self._number
            start = stop

    def _send_part(
        self, operation: RequestOperation, indices: Array, rows: Array | None, options: bytes, more: bool
    ) -> None:
        count, at = len(indices), self._number % DEPTH * self._places.nbytes
        place = self._rows[at : at + self._places.nbytes]
        np.subtract(indices, self._first, out=self._places.indices(place, count), casting="unsafe")
        if rows is not None:
            room = self._places.rows(place, count)
            np.copyto(room, rows)
            counters.copied(room.nbytes)
        nbytes = self._places.size(count, full=rows is not None) if count else 0
        transfers = []
        if self._staging is not None and count:
            transfers.append((self._staging.view(at, nbytes), self.memory.view(at, nbytes)))
        self.send(operation, options, (count, more), self._whole, transfers=transfers, nbytes=nbytes)

    def ask(self, indices: Array, options: bytes) -> None:
        """Asks for the first of these rows, as many as the places of answers take."""
        self._wanted = self._taken = 0
        self._next = self._asked + 1  # answers before it belong to a pull that was interrupted
        for _ in range(ANSWERS):
            self._ask_for_more(indices, options)

    def _part(self, indices: Array, start: int) -> Array:
        """Those of a pull that are asked for at once, from that place on."""
        count = self._places.part(len(indices)) if self.mapped else self._places.most
        return indices[start : start + count]

    def _ask_for_more(self, indices: Array, options: bytes) -> None:
        part = self._part(indices, self._wanted)
        if len(part):
            self._wanted += len(part)
            self.ask_for(RequestOperation.PULL, part, None, options)

    @property
    def _awaited(self) -> int:
        """The next answer of a pull, or the last one, if all have been read."""
        return min(self._next, self._asked)

    @property
    def answer_is_there(self) -> bool:
        """Whether it has come."""
        return self._arrived.value >= self._awaited

    def wait_for_answer(self, timeout: float) -> None:
        """Returns when it has."""
        self._arrived.wait(self._awaited, timeout)

    def take(self, indices: Array, out: Array, options: bytes, timeout: float) -> None:
        """Copies the rows that were asked for, and asks for the rest."""
        while self._taken < len(indices):
            _, rows, _ = self._answer(self._next, timeout)
            asked = len(self._part(indices, self._taken))
            if len(rows) != asked:
                raise ProtocolError(f"{self.name} answered with {len(rows)} rows, and was asked for {asked}")
            out[self._taken : self._taken + len(rows)] = rows
            counters.copied(rows.nbytes)
            with self._client.course.unit("a pull of rows"):
                self._taken += len(rows)
                self._next += 1
                self._ask_for_more(indices, options)

    def changes(self, timeout: float) -> tuple[Array, Array, bool]:
        """The answer to the last request, in its memory: numbers, rows, and whether there is more."""
        return self._answer(self._asked, timeout)

    def _answer(self, number: int, timeout: float) -> tuple[Array, Array, bool]:
        place = self._answers.receive(number, timeout)
        assert place is not None
        count, more = self._places.answered(place)
        return self._places.indices(place, count), self._places.rows(place, count), more
