"""What stores have in common that workers send requests to, those of keys and of rows, on a server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import numpy.typing as npt

from tensorwire.control import Member
from tensorwire.control.names import member_name
from tensorwire.device import RemoteRegion
from tensorwire.device.mapped import unmap
from tensorwire.errors import ProtocolError
from tensorwire.store.admission import check_versions
from tensorwire.store.endpoints import find, show
from tensorwire.store.fates import Fates
from tensorwire.store.modes import SSP, Sync
from tensorwire.store.request_link import DEPTH, Request, RequestOperation
from tensorwire.store.rounds import Members
from tensorwire.store.sharding import Bucket
from tensorwire.store.store_layout import StoreSpec
from tensorwire.store.versions.snapshots import Snapshots


class RequestPeer:
    """What a store shares with one worker: memory here that the worker writes to, and memory there."""

    theirs: RemoteRegion

    def __init__(self, member: Member, store: str, worker: int, incarnation: int, nbytes: int, source: int) -> None:
        self.index, self.name, self.incarnation = worker, member_name("worker", worker), incarnation
        self.channel = member.channel(self.name)
        device = self.channel.device
        self.inbox = device.allocate(nbytes)
        # Where the worker's memory cannot be mapped, values leave from a copy: they may change while they travel.
        self.source = None if device.capabilities.maps else device.allocate(source)
        self._find = partial(find, member, store, self.name)
        show(member, store, self.name, self.inbox)

    def open(self) -> None:
        """Waits until the worker has said where its memory is."""
        self.theirs, _ = self._find()

    def close(self) -> None:
        """Frees the memory here."""
        self.inbox.close()
        unmap(self.channel, self.theirs)
        if self.source is not None:
            self.source.close()


class RequestStore:
    """A store ``name`` of ``member``, a server, that workers send requests to. Checks its versions first.

    Attributes:
        peers: By rank, in their order: what it shares with each worker, also with those that were lost.
        snapshots: Where buckets are kept for readers, if these get versions of it; its own follow ``first_bucket``.
    """

    peers: Mapping[int, RequestPeer]
    snapshots: Snapshots | None = None
    first_bucket = 0

    def __init__(self, member: Member, name: str, spec: StoreSpec) -> None:
        check_versions(spec.versions, spec.rule, member.name)
        self.member, self.name, self.spec, self.index = member, name, spec, member.index
        self.together = isinstance(spec.mode, Sync)
        self.bound = spec.mode.staleness if isinstance(spec.mode, SSP) else None
        self.first = dict(member.membership.workers)  # of the workers that it begins with: which incarnation
        self.members = Members(frozenset(self.first))
        self.option_bytes = 8 * len(spec.numeric)
        self.fates = Fates(member.client.welcome, name, self.index, ahead=DEPTH)

    def handle(self, worker: int, request: Request) -> bool:
        """Does what a worker asks, or notes it for when others have come; each worker's requests in their order.

        Returns whether the worker waits for an answer alone: then nothing has to tell it that this was looked at.
        """
        raise NotImplementedError

    def incarnation(self, worker: int) -> int | None:
        """That of the worker of a rank that this store knows, if there is one."""
        peer = self.peers.get(worker)
        return None if peer is None else peer.incarnation

    def admit(self, worker: int, incarnation: int) -> None:
        """Lets a worker join. Waits until it has come to this store. Raises `PeerLost` where it is lost before."""
        peer = self._make_peer(worker, incarnation)
        self.member.outwait(lambda _: peer.open())
        before = self.peers.get(worker)
        self._let_in(peer)
        if before is not None and self.member.is_settled(before.channel):
            before.close()

    def _make_peer(self, worker: int, incarnation: int) -> RequestPeer:
        raise NotImplementedError

    def _let_in(self, peer: RequestPeer) -> None:
        """Requests of that worker are from now on those of ``peer``."""
        raise NotImplementedError

    def lose(self, worker: int) -> None:
        """A worker is lost: no round waits for it, and what came from it counts.

        Raises `Disagreement` where there are no values yet.
        """
        self.members = self.members.lose(worker)

    # ---- versions for readers, of stores that have values

    def at_rest(self, bucket: int | None = None) -> AbstractContextManager[object]:
        """Inside it no round of a bucket closes, or no round at all."""
        raise NotImplementedError

    def bytes_of(self, bucket: Bucket) -> npt.NDArray[np.uint8]:
        """The values of a bucket, in their memory."""
        raise NotImplementedError

    def updates(self, bucket: int) -> int:
        """How many updates a bucket has had."""
        raise NotImplementedError

    def before_write(self, buckets: Iterable[int]) -> None:
        """Buckets are about to change. The caller keeps others from them."""
        snapshots = self.snapshots  # another thread may take it away
        if snapshots is not None:
            for bucket in buckets:
                snapshots.before_write(self.first_bucket + bucket)

    # ---- the rest

    def check_worker_0(self, peer: RequestPeer, operation: RequestOperation) -> None:
        """Raises `ProtocolError` where another worker asks for what is for worker 0."""
        if peer.index:
            raise ProtocolError(f"{peer.name} sent {operation.name}, which is for worker 0")

    def close(self) -> None:
        """Frees the store's memory."""
        self.fates.close()
        for peer in self.peers.values():
            peer.close()
