"""Versions for readers of stores of keys and of rows: a server's part.

Worker 0 asks for one between its own requests to these stores, when all that it has pushed has been applied. Where all
workers have to push before a round closes, none does until worker 0 goes on: so a version has the values that a pull of
everything would have brought. Elsewhere each server takes part with the values that it has when it hears of it.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tensorwire.control import Member
from tensorwire.edge import Producer
from tensorwire.errors import ProtocolError
from tensorwire.store.key_server import KeyServer
from tensorwire.store.request_link import WORD, Request, RequestOperation
from tensorwire.store.request_store import RequestPeer, RequestStore
from tensorwire.store.sharding import PAGE, Bucket, joined
from tensorwire.store.store_layout import StoreSpec
from tensorwire.store.versions.cuts import unpack_cut
from tensorwire.store.versions.publisher import Publisher
from tensorwire.store.versions.snapshots import Moments, ShardValues, Snapshots
from tensorwire.store.writers import Writers, takes_writers


class PublishedKeys(RequestStore):
    """Makes versions of ``stores``, which are on this server, until all workers have finished with it.

    ``fail``: what becomes of an error in a thread.
    """

    def __init__(
        self,
        member: Member,
        name: str,
        spec: StoreSpec,
        servers: int,
        stores: Sequence[RequestStore],
        fail: Callable[[BaseException], None],
    ) -> None:
        super().__init__(member, name, spec)
        assert spec.publish is not None
        plans, count = [part.plan(servers) for part in spec.parts.values()], spec.publish.buffers
        plan = joined(plans)
        self._stores = stores
        self._buckets: list[Bucket] = []  # as the stores' own plans have them
        self._firsts: list[int] = []  # by store: the number of its first bucket here
        for part in plans:
            self._firsts.append(len(self._buckets))
            self._buckets += part.buckets[self.index]
        self.peers: dict[int, RequestPeer] = {rank: self._make_peer(rank, n) for rank, n in self.first.items()}
        for peer in self.peers.values():
            peer.open()
        self._publisher: Publisher | None = None
        if self.index == 0:
            first = self.peers[min(self.peers)]
            grant, asked = (Producer(first.channel, first.theirs.view(at, 8)) for at in (0, WORD))
            self._publisher = Publisher(member, name, plan, count, grant, asked, by_bucket=True)
        moments = Moments(self._all_at_rest, self._updates)
        values = ShardValues(self._bytes_of)
        self._snapshots = Snapshots(member, name, plan, self.index, values, count, None, moments)
        for store, number in zip(stores, self._firsts, strict=True):
            store.first_bucket, store.snapshots = number, self._snapshots
        self._writers = [
            Writers(store, fail) for store in stores if isinstance(store, KeyServer) and takes_writers(store.spec)
        ]

    def _make_peer(self, worker: int, incarnation: int) -> RequestPeer:
        return RequestPeer(self.member, self.name, worker, incarnation, PAGE, PAGE)

    def _let_in(self, peer: RequestPeer) -> None:
        self.peers = dict(sorted({**self.peers, peer.index: peer}.items()))

    def handle(self, worker: int, request: Request) -> bool:
        """As `RequestStore`."""
        if request.operation is RequestOperation.CUT:
            self.check_worker_0(self.peers[worker], request.operation)
            self._snapshots.take(unpack_cut(request.options))
        elif request.operation is not RequestOperation.FINISH:
            raise ProtocolError(f"worker {worker} sent {request.operation.name}, which is for keys, to {self.name}")
        return False

    def _store_of(self, bucket: int) -> tuple[RequestStore, int]:
        """Whose a bucket is, and its number there."""
        at = bisect_right(self._firsts, bucket) - 1
        return self._stores[at], bucket - self._firsts[at]

    def _bytes_of(self, _: int, bucket: Bucket) -> npt.NDArray[np.uint8]:
        return self._store_of(bucket.index)[0].bytes_of(self._buckets[bucket.index])

    def _updates(self, bucket: int) -> int:
        store, own = self._store_of(bucket)
        return store.updates(own)

    @contextlib.contextmanager
    def _all_at_rest(self) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for store in self._stores:
                held.enter_context(store.at_rest())
            yield

    def close(self) -> None:
        """As `RequestStore`."""
        for writers in self._writers:
            writers.close()
        for store in self._stores:
            store.snapshots = None
        super().close()
        if self._publisher is not None:
            self._publisher.close()
        self._snapshots.close()
