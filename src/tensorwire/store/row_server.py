"""A server of a table of rows. Its workers' requests are done in the order of each; none keeps a thread waiting.

`Sync`: a push is done when all workers that have not finished have pushed, and the sum of it was applied. Other modes
apply each push by itself. With `SSP`, a pull waits until the slowest worker has pushed often enough.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tensorwire._native import take_rows
from tensorwire.control import Member
from tensorwire.edge import Producer
from tensorwire.errors import PeerLost, ProtocolError
from tensorwire.observe import counters
from tensorwire.store.admission import check_memory
from tensorwire.store.consensus import Disagreement
from tensorwire.store.fates import Sent
from tensorwire.store.request_link import WORD, WORKER_0, Request, RequestOperation
from tensorwire.store.request_store import RequestPeer, RequestStore
from tensorwire.store.rounds import divisor, is_due, may_read, slowest
from tensorwire.store.row_layout import ANSWERS, DEPTH, Array, RowPlaces, RowRequest, divide, merge, rows_of_bucket
from tensorwire.store.row_rules import draw, make_row_rule
from tensorwire.store.server_state import take_state
from tensorwire.store.sharding import Bucket
from tensorwire.store.store_layout import StoreSpec

_NOT_OF_ROWS = (RequestOperation.PUSHPULL, RequestOperation.CUT)
_Rows = tuple[Array, Array]  # numbers and rows


class RowServer(RequestStore):
    """Serves its part of the table ``name`` to all workers until they finish."""

    def __init__(self, member: Member, name: str, spec: StoreSpec, servers: int) -> None:
        super().__init__(member, name, spec)
        ranks = sorted(self.first)
        assert spec.table is not None
        self.table = spec.table
        tensor = spec.tensors[0]
        first, end = divide(tensor.shape[0], servers)[member.index :][:2]
        self.places = RowPlaces(self.table.most, tensor.shape[1:], tensor.dtype)
        kept = (end - first) * tensor.nbytes // max(1, tensor.shape[0])
        check_memory(kept + 2 * len(ranks) * (DEPTH + ANSWERS) * self.places.nbytes, member.name)
        self.values = np.empty((end - first, *tensor.shape[1:]), tensor.dtype)
        draw(self.table, self.values, first)
        self.rule = make_row_rule(spec, first, self.values)
        self.peers: dict[int, _Peer] = {rank: self._make_peer(rank, n) for rank, n in self.first.items()}
        for peer in self.peers.values():
            peer.open()
        self._lock = threading.Lock()  # guards all that follows, and the values
        self._clocks = dict.fromkeys(ranks, 0)  # pushes so far
        self._here: dict[int, tuple[_Rows, bytes]] = {}  # the open round: by worker, rows and options
        self._new: set[int] = set()  # workers that joined, and have not pushed yet: nobody waits for them
        self._version = 0
        self._rows_of_bucket = rows_of_bucket(tensor.nbytes // tensor.shape[0], spec.bucket_bytes)
        self._ready = False

    def handle(self, worker: int, request: Request) -> bool:
        """As `RequestStore`. A request waits for what other workers do; with it, what has waited for it is done."""
        with self._lock:
            if len(request.options) != self.option_bytes or request.operation in _NOT_OF_ROWS:
                raise ProtocolError(f"worker {worker} sent a request that does not fit the rows of {self.name}")
            self.peers[worker].take(request)
            self._serve_all()
        return request.operation is not RequestOperation.FINISH

    def _serve_all(self) -> None:
        """Does what need not wait any longer. The caller holds the lock."""
        served = True
        while served:
            served = False
            for peer in self.peers.values():
                while peer.waiting and self._serve(peer, peer.waiting[0]):
                    peer.end()
                    served = True

    def _make_peer(self, worker: int, incarnation: int) -> _Peer:
        return _Peer(self, worker, incarnation)

    def _let_in(self, peer: RequestPeer) -> None:
        assert isinstance(peer, _Peer)
        with self._lock:
            peer.changed[:] = True
            self.peers = dict(sorted({**self.peers, peer.index: peer}.items()))
            self._new.add(peer.index)
            self.members = self.members.join(peer.index)

    def _count(self, worker: int) -> None:
        """A worker has pushed. One that joined takes part from then on, as far as the slowest of the others."""
        if worker in self._new:
            self._clocks[worker] = slowest(self.members.without(self._new), self._clocks, self._version)
            self._new.discard(worker)
        self._clocks[worker] += 1

    def lose(self, worker: int) -> None:
        """As `RequestStore`. A part of a push that took several requests changes nothing."""
        with self._lock:
            if worker == 0 and not self._ready:
                raise Disagreement(worker, f"was lost before the rows of {self.name} had their first values")
            super().lose(worker)
            self.peers[worker].lost = True
            self._close_if_due()
            self._serve_all()

    def _serve(self, peer: _Peer, request: RowRequest) -> bool:
        """Does a worker's next request. False: it has to wait. The caller holds the lock."""
        operation = request.operation
        if operation is RequestOperation.FINISH:
            self._leave(peer.index)
        elif operation in WORKER_0:
            self._set(peer, request)
        elif not self._ready:
            return False
        elif operation is RequestOperation.IDLE:
            self._rest(peer.index)
        elif operation is RequestOperation.PUSH:
            return self._push(peer, request)
        elif not self._in_bound(peer.index):
            return False
        elif operation is RequestOperation.PULL:
            peer.answer(request.indices, self.values)
        else:
            peer.answer_changes(self.values)
        return True

    def _in_bound(self, worker: int) -> bool:
        if self.bound is None:
            return True
        return may_read(self.members.without(self._new), self._clocks, worker, self._clocks[worker], self.bound)

    def _set(self, peer: _Peer, request: RowRequest) -> None:
        """What worker 0 alone does, while others wait for it."""
        self.check_worker_0(peer, request.operation)
        if request.operation is RequestOperation.LOAD:
            take_state(self.member, self.name, self.member.index, request.number, self.rule)
        elif request.rows is not None:
            self._keep(request.indices)
            self.values[request.indices] = request.rows
            self._mark(request.indices)
        else:
            self._ready = True

    # ---- pushes

    def _push(self, peer: _Peer, request: RowRequest) -> bool:
        """Whether a push, or a part of one, is done."""
        if peer.index in self._here:
            return False
        if peer.merged:  # the round that it was in has closed
            peer.merged = False
            return True
        rows = peer.collect(request)
        if rows is None:
            return True
        self._count(peer.index)
        if not self.together:
            self._apply({peer.index: (rows, request.options)})
            return True
        self._here[peer.index] = rows, request.options
        self._close_if_due()
        return self._push(peer, request)

    def _close_if_due(self) -> None:
        """Merges and applies, if all are there. The caller holds the lock."""
        if is_due(self.members.without(self._new), self._here.keys()):
            here, self._here = dict(sorted(self._here.items())), {}
            self._apply(here)
            for worker in here:
                self.peers[worker].merged = True

    def _apply(self, here: dict[int, tuple[_Rows, bytes]]) -> None:
        """One update by the sum or the mean of contributions, in the order of workers. The caller holds the lock."""
        given = [rows for rows, _ in here.values()]
        indices, rows = given[0]
        if len(given) > 1:
            indices, rows = merge(np.concatenate([i for i, _ in given]), np.concatenate([r for _, r in given]))
        if self.together and self.spec.reduce == "mean":  # a worker that rests has a gradient of zero
            by = divisor(self.members, here.keys(), "mean") if self.table.followed else len(given)
            rows = rows if by == 1 else rows / np.array(by, rows.dtype)
        self._keep(indices)
        self.rule.update(indices, rows, next(iter(here.values()))[1])  # without rows, too: the rule may count updates
        self._mark(indices)
        self._version += 1
        pushes = [Sent(worker, self.peers[worker].incarnation, self._clocks[worker]) for worker in here]
        alike = len(pushes)
        self.fates.closed(0, self._version, pushes, [1 / alike] * alike, [0] * alike, alone=not self.together)

    def _keep(self, indices: Array) -> None:
        """These rows are about to change."""
        snapshots = self.snapshots
        if snapshots is not None and snapshots.filling:
            self.before_write(np.unique(indices // self._rows_of_bucket).tolist())

    def _mark(self, indices: Array) -> None:
        if self.table.followed:
            for peer in self.peers.values():
                peer.changed[indices] = True

    def _rest(self, worker: int) -> None:
        """No round waits for a worker until all rest; then rounds wait for all again."""
        self.members = self.members.rest(worker)
        self._close_if_due()
        self.members = self.members.resume()

    def _leave(self, worker: int) -> None:
        """A worker has finished: no round waits for it, and what it pushed counts."""
        self.members = self.members.finish(worker)
        self._close_if_due()

    # ---- the rest

    def at_rest(self, part: int | None = None) -> contextlib.AbstractContextManager[object]:
        """Inside it no round closes."""
        return self._lock

    def bytes_of(self, bucket: Bucket) -> npt.NDArray[np.uint8]:
        """As `RequestStore`."""
        return self.values.reshape(-1).view(np.uint8)[bucket.shard : bucket.shard + bucket.nbytes]

    def updates(self, bucket: int) -> int:
        """As `RequestStore`."""
        return self._version


class _Peer(RequestPeer):
    """What this server shares with one worker, and what that one has asked for."""

    def __init__(self, server: RowServer, index: int, incarnation: int) -> None:
        nbytes = server.places.nbytes
        super().__init__(server.member, server.name, index, incarnation, DEPTH * nbytes, ANSWERS * nbytes)
        self._server, self._places = server, server.places
        memory = memoryview(self.inbox)
        self._slots = [memory[n * nbytes : (n + 1) * nbytes] for n in range(DEPTH)]
        self.waiting: deque[RowRequest] = deque()  # requests that are not done
        self.lost = False  # its memory may be gone
        self.merged = False  # the first of these is a push, which was in a round that has closed
        self._asked = self._answered = 0
        self._row_bytes = server.values[0:1].nbytes
        self._parts: list[_Rows] = []  # of a contribution that takes several requests
        rows = len(server.values) if server.table.followed else 0
        self.changed = np.zeros(rows, np.bool_)  # since they were sent to this worker last

    def open(self) -> None:
        """Makes the way back, once the worker has said where its memory is."""
        super().open()
        self._done = Producer(self.channel, self.theirs.view(0, 8))
        nbytes, source = self._places.nbytes, self.source
        self._answers = Producer(
            self.channel,
            self.theirs.view(WORD, 8),
            slots=[self.theirs.view(2 * WORD + n * nbytes, nbytes) for n in range(ANSWERS)],
            source=[] if source is None else [source.view(n * nbytes, nbytes) for n in range(ANSWERS)],
            label=f"{self.name}, rows",
        )

    def take(self, request: Request) -> None:
        """Notes a request, whose rows lie in the next place. Raises `ProtocolError`."""
        self._asked += 1
        place = self._slots[self._asked % DEPTH]
        self.waiting.append(self._places.request(place, request, self._asked, len(self._server.values)))

    def end(self) -> None:
        """The first request that waits is done: its place is free. Of two pulls, the worker hears of one."""
        request = self.waiting.popleft()
        if not self.lost and (request.operation is not RequestOperation.PULL or request.number % 2 == 0):
            with contextlib.suppress(PeerLost):  # this worker's thread will hear of it, too
                self._done.send(request.number)

    def collect(self, request: RowRequest) -> _Rows | None:
        """A contribution, once all of its parts are there. A whole one is valid until its request is done."""
        assert request.rows is not None
        if request.more:  # its place is needed for the next part
            self._parts.append((request.indices.copy(), request.rows.copy()))
            counters.copied(request.rows.nbytes)
            return None
        parts, self._parts = [*self._parts, (request.indices, request.rows)], []
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([i for i, _ in parts]), np.concatenate([r for _, r in parts])

    def answer(self, indices: Array, values: Array, *, more: bool = False) -> None:
        """Sends the rows of these numbers, if the worker is there."""
        if not self.lost:
            with contextlib.suppress(PeerLost):
                self._answer(indices, values, more=more)

    def _answer(self, indices: Array, values: Array, *, more: bool) -> None:
        self._answered += 1
        place, count = self._answers.slot(self._answered), len(indices)
        self._places.head(place, count, more)
        if more or self._server.table.followed:
            self._places.indices(place, count)[:] = indices
        rows = self._places.rows(place, count)
        take_rows(rows, values, indices, self._row_bytes)
        counters.copied(rows.nbytes)
        self._answers.send(self._answered, nbytes=self._places.size(count, full=True))

    def answer_changes(self, values: Array) -> None:
        """Sends rows that have changed since they were sent last, as many as an answer takes."""
        found: Sequence[int] | Array = np.flatnonzero(self.changed)
        some = np.asarray(found[: self._places.most], np.uint32)
        self.changed[some] = False
        self.answer(some, values, more=len(found) > len(some))
