"""A worker's side of a table of rows. Imports no framework. One thread at a time may use it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
import numpy as np

from tensorwire.control import Member
from tensorwire.control.names import member_name
from tensorwire.control.settings import step_timeout
from tensorwire.device import Channel, RemoteRegion
from tensorwire.device.mapped import unmap
from tensorwire.edge import Consumer, Producer, Word
from tensorwire.errors import ProtocolError, WaitTimeout
from tensorwire.observe import counters
from tensorwire.store.course import Course, last_request_waited
from tensorwire.store.fates import FateLog, Produced
from tensorwire.store.modes import awaited
from tensorwire.store.row_layout import DEPTH, WORD, Array, RowOperation, RowPlaces, divide
from tensorwire.store.sharding import StorePlan
from tensorwire.store.store_layout import ServerEndpoint, StoreSpec, WorkerEndpoint


class RowClient:
    """One worker's end of the table ``name``. All workers have to `agree` on it before.

    Numbers of rows are unique, in ascending order, and within the table: callers see to that.
    """

    def __init__(self, member: Member, name: str, spec: StoreSpec, plan: StorePlan) -> None:
        assert spec.table is not None
        self.member, self.name, self.spec, self.plan = member, name, spec, plan
        self.timeout = step_timeout()  # seconds that an answer may take, as other workers have to come
        if member.index == 0:
            member.client.publish(name, spec.encoded())
        self.course = Course(member)
        self.step = 0  # -1: this worker has left
        self.asks = 0  # for the rule's state, that are known to have been published
        self.starts = divide(spec.tensors[0].shape[0], plan.servers)
        self._links = [_Link(self, server) for server in range(plan.servers)]
        self._unread: list[tuple[_Link, int]] = []  # where changes were asked for, and their first rows
        self._pushes = 0
        self._log = FateLog(member.client.welcome, name, member.name)

    @property
    def channels(self) -> list[Channel]:
        """To each server."""
        return [link.channel for link in self._links]

    def _parts(self, indices: Array) -> Iterator[tuple[_Link, slice]]:
        """Each server, and which of the rows are on it."""
        cuts = np.searchsorted(indices, self.starts)
        for link, start, stop in zip(self._links, cuts, cuts[1:], strict=False):
            yield link, slice(int(start), int(stop))

    def push(self, indices: Array, rows: Array, options: bytes) -> list[int]:
        """Contributes rows, on every server. Returns the number of the last request to each: see `applied`."""
        for link in self._links:
            link.wait_for_room()
        with self._unit("a push"):
            parts = self._parts(indices)
            numbers = [link.send(RowOperation.PUSH, indices[at], rows[at], options) for link, at in parts]
            self._pushes += 1
        counters.add(pushes=len(numbers))
        return numbers

    def _unit(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self.course.unit(f"{what} of rows of {self.spec.tensors[0].name}")

    def applied(self, numbers: Sequence[int]) -> bool:
        """Whether the servers have done the requests of these numbers."""
        return all(link.done.value >= number for link, number in zip(self._links, numbers, strict=True))

    def wait_applied(self, numbers: Sequence[int], timeout: float | None = None) -> None:
        """Returns when they have. Raises `PeerLost` or `WaitTimeout`."""
        for link, number in zip(self._links, numbers, strict=True):
            self.member.wait(partial(link.done.wait, number), self.timeout if timeout is None else timeout, self._place)

    def _place(self) -> tuple[str, str]:
        return self.name, awaited(self.spec.mode, self.member.client.welcome.workers)

    def ask(self, indices: Array, options: bytes) -> None:
        """Asks for rows; `take` has to follow before the next `ask`."""
        with self._unit("a pull"):
            for link, at in self._parts(indices):
                link.ask(indices[at], options)

    def ready(self, indices: Array) -> bool:
        """Whether the first answers to `ask` are there."""
        return all(at.start == at.stop or link.answer_is_there for link, at in self._parts(indices))

    def wait_ready(self, indices: Array, timeout: float | None = None) -> None:
        """Returns when they are. Raises `PeerLost` or `WaitTimeout`."""
        for link, at in self._parts(indices):
            if at.start < at.stop:
                link.wait_for_answer(self.timeout if timeout is None else timeout)

    def take(self, indices: Array, out: Array, options: bytes, timeout: float | None = None) -> None:
        """Copies the rows that `ask` asked for into ``out``. Raises `PeerLost`, or `WaitTimeout`; then call again."""
        for link, at in self._parts(indices):
            link.take(indices[at], out[at], options, self.timeout if timeout is None else timeout)

    def changes(self, options: bytes) -> Iterator[tuple[Array, Array]]:
        """Numbers and rows that have changed since the last call; the memory is valid until the next are asked for.

        Where a call was interrupted, the next one goes on from what it gave last.
        """
        if not self._unread:
            with self._unit("a pull"):
                for link in self._links:
                    link.send(RowOperation.CHANGES, np.empty(0, np.int64), None, options)
                self._unread = list(zip(self._links, self.starts, strict=False))
        while self._unread:
            link, start = self._unread[0]
            indices, rows, more = link.changes(self.timeout)
            yield indices.astype(np.int64) + start, rows
            if more:
                with self._unit("a pull"):
                    link.send(RowOperation.CHANGES, np.empty(0, np.int64), None, options)
            else:
                del self._unread[0]

    def assign(self, indices: Array, rows: Array, options: bytes) -> None:
        """Worker 0: these rows become the values. Returns when they are."""
        with self._unit("setting"):
            parts = list(self._parts(indices))
            self.wait_applied([link.send(RowOperation.ASSIGN, indices[at], rows[at], options) for link, at in parts])

    def announce(self, operation: RowOperation, options: bytes) -> list[int]:
        """A request to every server that names no row. Returns the number that it has on each."""
        with self._unit("a request"):
            return [link.send(operation, np.empty(0, np.int64), None, options) for link in self._links]

    def finish(self) -> None:
        """Tells every server that this worker is done, and gives its memory back.

        Idempotent. Raises `WaitTimeout` or `PeerLost`, and then keeps what servers may still write to.
        """
        if self.step < 0:
            return
        if self.course.broken:
            self.step = -1
            self.course.check()  # the servers wait for the rest: the others are not to go on with what there is
        try:
            self.wait_applied(self.announce(RowOperation.FINISH, bytes(8 * len(self.spec.numeric))))
            for link in self._links:
                link.close()
        except WaitTimeout:
            raise last_request_waited(self.name, self.timeout) from None
        finally:
            self.step = -1
        self._log.add(*(Produced(self.name, s, self.member.index, self._pushes) for s in range(len(self._links))))
        self._log.close()


class _Link:
    """What this worker shares with one server."""

    def __init__(self, client: RowClient, index: int) -> None:
        spec, member = client.spec, client.member
        assert spec.table is not None
        self._client: RowClient = weakref.proxy(client)  # which has this
        self._first = client.starts[index]
        name = member_name("server", index)
        self.channel: Channel = member.channel(name)
        key = f"{client.name}/{name}/{member.name}"
        endpoint = msgspec.msgpack.decode(member.client.lookup(key, timeout=600.0), type=ServerEndpoint)
        self._inbox = inbox = RemoteRegion.unpack(endpoint.inbox)
        device = self.channel.device
        if inbox.device != device.name:
            raise ProtocolError(f"{name} answers over {inbox.device}, we over {device.name}")
        tensor = spec.tensors[0]
        self._places = places = RowPlaces(spec.table.most, tensor.shape[1:], tensor.dtype, 8 * len(spec.numeric))
        self._words = device.allocate(2 * WORD)
        self.done = Word(self._words, 0, self.channel)
        self._arrived = Word(self._words, WORD, self.channel)
        self._memory = device.allocate(places.nbytes)
        self._answers = Consumer(self._arrived, slots=[memoryview(self._memory)])
        slots = [inbox.view(WORD + n * places.nbytes, places.nbytes) for n in range(DEPTH)]
        self._ring = None if self.channel.map(inbox.view()) else device.allocate(DEPTH * places.nbytes)
        ring = self._ring
        source = [] if ring is None else [ring.view(n * places.nbytes, places.nbytes) for n in range(DEPTH)]
        self._requests = Producer(
            self.channel,
            inbox.view(0, 8),
            slots=slots,
            source=source,
            credit=self.done,
            label=f"{name}, rows",
        )
        self._number = self._asked = 0  # requests, and those that are answered
        self._taken = 0  # of the rows that were asked for
        own = WorkerEndpoint(self._words.remote("write").pack(), self._memory.remote("write").pack())
        key = f"{client.name}/{member.name}/{name}"
        member.client.publish(key, msgspec.msgpack.encode(own), to=[name])

    def wait_for_room(self) -> None:
        """Returns when the server takes a request. Raises `PeerLost` or `WaitTimeout`."""
        self._requests.slot(self._number + 1, self._client.timeout)

    def close(self) -> None:
        """Gives its memory back."""
        for region in (self._words, self._memory, *([] if self._ring is None else [self._ring])):
            region.close()
        unmap(self.channel, self._inbox)

    def send(self, operation: RowOperation, indices: Array, rows: Array | None, options: bytes) -> int:
        """Sends a request, in as many parts as it takes, and returns the number of the last."""
        most, start = self._places.most, 0
        self._asked += operation in (RowOperation.PULL, RowOperation.CHANGES)
        while True:
            stop = min(len(indices), start + most)
            count, more = stop - start, stop < len(indices)
            self._number += 1
            place = self._requests.slot(self._number, self._client.timeout)
            full = rows is not None
            nbytes = self._places.pack(place, operation, self._number, options, count, more=more, full=full)
            np.subtract(indices[start:stop], self._first, out=self._places.indices(place, count), casting="unsafe")
            if rows is not None:
                room = self._places.rows(place, count)
                np.copyto(room, rows[start:stop])
                counters.add(copies=1, copied_bytes=room.nbytes)
            self._requests.send(self._number, nbytes=nbytes)
            if not more:
                return self._number
            start = stop

    def ask(self, indices: Array, options: bytes) -> None:
        """Asks for the first of these rows, as many as an answer takes."""
        self._taken = 0
        if len(indices):
            self.send(RowOperation.PULL, indices[: self._places.most], None, options)

    @property
    def answer_is_there(self) -> bool:
        """Whether the last answer has come."""
        return self._arrived.value >= self._asked

    def wait_for_answer(self, timeout: float) -> None:
        """Returns when it has."""
        self._arrived.wait(self._asked, timeout)

    def take(self, indices: Array, out: Array, options: bytes, timeout: float) -> None:
        """Copies the rows that were asked for, and asks for the rest."""
        while self._taken < len(indices):
            _, rows, _ = self.changes(timeout)
            out[self._taken : self._taken + len(rows)] = rows
            counters.add(copies=1, copied_bytes=rows.nbytes)
            with self._client.course.unit("a pull of rows"):
                self._taken += len(rows)
                rest = indices[self._taken : self._taken + self._places.most]
                if len(rest):
                    self.send(RowOperation.PULL, rest, None, options)

    def changes(self, timeout: float) -> tuple[Array, Array, bool]:
        """The answer to the last request, in its memory: numbers, rows, and whether there is more."""
        place = self._answers.receive(self._asked, timeout)
        assert place is not None
        count, more = self._places.answered(place)
        return self._places.indices(place, count), self._places.rows(place, count), more
