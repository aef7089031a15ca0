"""A server of a table of rows: a thread per worker takes that worker's requests in their order.

`Sync`: a push returns when all workers that have not finished have pushed, and the sum of what they pushed was applied.
Other modes apply each push by itself. With `SSP`, a pull waits until the slowest worker has pushed often enough.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from tensorwire._native import take_rows
from tensorwire.control import Member
from tensorwire.control.names import member_name
from tensorwire.device import RemoteRegion
from tensorwire.device.mapped import unmap
from tensorwire.edge import Consumer, Producer, Word
from tensorwire.errors import ProtocolError, WaitTimeout
from tensorwire.observe import counters
from tensorwire.store.admission import check_memory, check_versions
from tensorwire.store.fates import Fates
from tensorwire.store.modes import SSP, Sync
from tensorwire.store.rounds import Members, divisor, is_due, may_read
from tensorwire.store.row_layout import (
    DEPTH,
    WORD,
    WORKER_0,
    Array,
    RowOperation,
    RowPlaces,
    RowRequest,
    divide,
    merge,
)
from tensorwire.store.row_rules import draw, make_row_rule
from tensorwire.store.server_state import take_state
from tensorwire.store.store_layout import ServerEndpoint, StoreSpec, WorkerEndpoint
from tensorwire.store.worker_threads import attend

_PATIENCE = 60.0  # between looks at the job while workers compute
_Rows = tuple[Array, Array]  # numbers and rows


class RowServer:
    """Serves its part of the table ``name`` to all workers until they finish."""

    def __init__(self, member: Member, name: str, spec: StoreSpec, workers: int, servers: int) -> None:
        self.member, self.name, self.spec = member, name, spec
        check_versions(spec.versions, spec.rule, member.name)
        assert spec.table is not None
        self.table = spec.table
        tensor = spec.tensors[0]
        first, end = divide(tensor.shape[0], servers)[member.index :][:2]
        self.places = RowPlaces(self.table.most, tensor.shape[1:], tensor.dtype, 8 * len(spec.numeric))
        kept = (end - first) * tensor.nbytes // max(1, tensor.shape[0])
        check_memory(kept + 2 * workers * DEPTH * self.places.nbytes, member.name)
        self.values = np.empty((end - first, *tensor.shape[1:]), tensor.dtype)
        draw(self.table, self.values, first)
        self.rule = make_row_rule(spec, first, self.values)
        self._together = isinstance(spec.mode, Sync)
        self._bound = spec.mode.staleness if isinstance(spec.mode, SSP) else None
        self._links = [_Link(self, worker) for worker in range(workers)]
        for link in self._links:
            link.open()
        self._changed = threading.Condition()  # guards all that follows, and the values
        self._clocks = dict.fromkeys(range(workers), 0)  # pushes so far
        self._members = Members.first(workers)
        self._here: dict[int, tuple[_Rows, bytes]] = {}  # the open round: by worker, rows and options
        self._version = 0
        self._fates = Fates(member.client.welcome, name, member.index)
        self._ready = False

    def run(self) -> None:
        """Returns when every worker has finished. Raises the first error of a worker's thread."""
        attend({f"{self.name} {link.name}": partial(self._attend, link) for link in self._links})

    def _attend(self, link: _Link) -> None:
        for number in itertools.count(1):
            request = link.next(number)
            if request.operation is RowOperation.FINISH:
                self._leave(link.index)
                link.release(number)  # the last that it reads
                return
            self._serve(link, request)
            link.release(number)

    def _serve(self, link: _Link, request: RowRequest) -> None:
        operation = request.operation
        if operation in WORKER_0:
            self._set(link, request)
            return
        if not self._ready:
            self._wait_until(lambda: self._ready)
        if operation is RowOperation.IDLE:
            self._rest(link.index)
            return
        if operation is RowOperation.PUSH:
            rows = link.collect(request)
            if rows is not None:
                self._push(link.index, rows, request.options)
            return
        if self._bound is not None:
            self._wait_until(lambda: self._in_bound(link.index))
        with self._changed:
            if operation is RowOperation.PULL:
                link.answer(request.number, request.indices, self.values)
            else:
                link.answer_changes(request.number, self.values)

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        """Returns when ``holds()``, as long as the job lives."""
        while True:
            with self._changed:
                if self._changed.wait_for(holds, _PATIENCE):
                    return
            self.member.check()

    def _in_bound(self, worker: int) -> bool:
        return may_read(self._members, self._clocks, worker, self._clocks[worker], self._bound or 0)

    def _set(self, link: _Link, request: RowRequest) -> None:
        """What worker 0 alone does, while others wait for it."""
        if link.index:
            raise ProtocolError(f"{link.name} sent {request.operation.name}, which is for worker 0")
        with self._changed:
            if request.operation is RowOperation.LOAD:
                take_state(self.member, self.name, self.member.index, request.number, self.rule)
            elif request.rows is not None:
                self.values[request.indices] = request.rows
                self._mark(request.indices)
            else:
                self._ready = True
                self._changed.notify_all()

    # ---- pushes

    def _push(self, worker: int, rows: _Rows, options: bytes) -> None:
        if not self._together:
            with self._changed:
                self._clocks[worker] += 1
                self._apply({worker: (rows, options)})
            return
        with self._changed:
            self._clocks[worker] += 1
            self._here[worker] = rows, options
            self._close_if_due()
        self._wait_until(lambda: worker not in self._here)

    def _close_if_due(self) -> None:
        """Merges and applies, if all are there. The caller holds the lock."""
        if is_due(self._members, self._here.keys()):
            here, self._here = dict(sorted(self._here.items())), {}
            self._apply(here)

    def _apply(self, here: dict[int, tuple[_Rows, bytes]]) -> None:
        """One update by the sum or the mean of contributions, in the order of workers. The caller holds the lock."""
        given = [rows for rows, _ in here.values()]
        indices, rows = given[0]
        if len(given) > 1:
            indices, rows = merge(np.concatenate([i for i, _ in given]), np.concatenate([r for _, r in given]))
        if self._together and self.spec.reduce == "mean":  # a worker that rests has a gradient of zero
            by = divisor(self._members, here.keys(), "mean") if self.table.followed else len(given)
            rows = rows if by == 1 else rows / np.array(by, rows.dtype)
        self.rule.update(indices, rows, next(iter(here.values()))[1])  # without rows, too: the rule may count updates
        self._mark(indices)
        self._version += 1
        pushes = [(worker, self._clocks[worker]) for worker in here]
        alike = len(pushes)
        self._fates.closed(0, self._version, pushes, [1 / alike] * alike, [0] * alike, alone=not self._together)
        self._changed.notify_all()

    def _mark(self, indices: Array) -> None:
        if self.table.followed:
            for link in self._links:
                link.changed[indices] = True

    def _rest(self, worker: int) -> None:
        """No round waits for a worker until all rest; then rounds wait for all again."""
        with self._changed:
            self._members = self._members.rest(worker)
            self._close_if_due()
            self._members = self._members.resume()

    def _leave(self, worker: int) -> None:
        """A worker has finished: no round waits for it, and what it pushed counts."""
        with self._changed:
            self._members = self._members.finish(worker)
            self._close_if_due()
            self._changed.notify_all()

    # ---- the rest

    def at_rest(self, part: int | None = None) -> contextlib.AbstractContextManager[object]:
        """Inside it no round closes."""
        return self._changed

    def close(self) -> None:
        """Frees the table's memory."""
        self._fates.close()
        for link in self._links:
            link.close()


class _Link:
    """What this server shares with one worker."""

    def __init__(self, server: RowServer, index: int) -> None:
        self._server, self.index, self._places = server, index, server.places
        self.name = member_name("worker", index)
        self._channel = server.member.channel(self.name)
        device, nbytes = self._channel.device, server.places.nbytes
        self._inbox = device.allocate(WORD + DEPTH * nbytes)
        memory = memoryview(self._inbox)
        places = [memory[WORD + n * nbytes : WORD + (n + 1) * nbytes] for n in range(DEPTH)]
        self._requests = Consumer(Word(self._inbox, 0, self._channel), slots=places)
        self._staging = None if device.capabilities.maps else device.allocate(nbytes)
        self._answered, self._row_bytes = 0, server.values[0:1].nbytes
        self._parts: list[_Rows] = []  # of a contribution that takes several requests
        rows = len(server.values) if server.table.followed else 0
        self.changed = np.zeros(rows, np.bool_)  # since they were sent to this worker last
        endpoint = msgspec.msgpack.encode(ServerEndpoint(self._inbox.remote("write").pack(), b""))
        key = f"{server.name}/{server.member.name}/{self.name}"
        server.member.client.publish(key, endpoint, to=[self.name])

    def open(self) -> None:
        """Makes the way back, once the worker has said where its memory is."""
        server = self._server
        key = f"{server.name}/{self.name}/{server.member.name}"
        found = msgspec.msgpack.decode(server.member.client.lookup(key, timeout=600.0), type=WorkerEndpoint)
        words, target = RemoteRegion.unpack(found.versions), RemoteRegion.unpack(found.parameters or b"")
        self._theirs = [words, target]
        self._requests.credit_to(self._channel, words.view(0, 8))
        self._answers = Producer(
            self._channel,
            words.view(WORD, 8),
            slots=[target.view(0, self._places.nbytes)],
            source=[] if self._staging is None else [self._staging.view()],
            label=f"{self.name}, rows",
        )

    def next(self, number: int) -> RowRequest:
        """The request of that number. Waits as long as the job lives."""
        while True:
            try:
                place = self._requests.receive(number, _PATIENCE)
                break
            except WaitTimeout:
                self._server.member.check()
        assert place is not None
        request = self._places.unpack(place, len(self._server.values))
        if request.number != number:
            raise ProtocolError(f"{self.name} sent request {request.number} in place of {number}")
        return request

    def release(self, number: int) -> None:
        """Tells the worker that requests up to this one are done."""
        self._requests.release(number)

    def collect(self, request: RowRequest) -> _Rows | None:
        """A contribution, once all of its parts are there. A whole one is valid until its request is released."""
        assert request.rows is not None
        if request.more:  # its place is needed for the next part
            self._parts.append((request.indices.copy(), request.rows.copy()))
            counters.add(copies=1, copied_bytes=request.rows.nbytes)
            return None
        parts, self._parts = [*self._parts, (request.indices, request.rows)], []
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([i for i, _ in parts]), np.concatenate([r for _, r in parts])

    def answer(self, number: int, indices: Array, values: Array, *, more: bool = False) -> None:
        """Sends the rows of these numbers."""
        self._answered += 1
        place, count = self._answers.slot(self._answered), len(indices)
        nbytes = self._places.pack(place, 0, number, self._no_options, count, more=more, full=True)
        if more or self._server.table.followed:
            self._places.indices(place, count)[:] = indices
        rows = self._places.rows(place, count)
        take_rows(rows, values, indices, self._row_bytes)
        counters.add(copies=1, copied_bytes=rows.nbytes)
        self._answers.send(self._answered, nbytes=nbytes)

    def answer_changes(self, number: int, values: Array) -> None:
        """Sends rows that have changed since they were sent last, as many as an answer takes."""
        found: Sequence[int] | Array = np.flatnonzero(self.changed)
        some = np.asarray(found[: self._places.most], np.uint32)
        self.changed[some] = False
        self.answer(number, some, values, more=len(found) > len(some))

    @property
    def _no_options(self) -> bytes:
        return bytes(8 * len(self._server.spec.numeric))

    def close(self) -> None:
        """Frees its memory."""
        self._inbox.close()
        unmap(self._channel, *self._theirs)
        if self._staging is not None:
            self._staging.close()
