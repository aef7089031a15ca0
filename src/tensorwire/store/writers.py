"""Pushes to keys by *writers*, processes that are no part of the job: what both sides know, and a server's part.

A writer asks each server that has some of a key for a region. It writes its push there one-sidedly, with a number as
the signal, and reads when that number is done; nothing connects to it. Numbers grow, so that no push is applied twice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tensorwire.control import Member
from tensorwire.device import Region
from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import PeerLost, RegionClosed, TensorwireError, WaitTimeout
from tensorwire.store.modes import Async
from tensorwire.store.request_link import WORD
from tensorwire.store.sharding import PAGE, Bucket, StorePlan
from tensorwire.store.store_layout import StoreSpec
from tensorwire.store.versions.listing import topic

if TYPE_CHECKING:
    from tensorwire.store.key_server import KeyServer

DONE = WORD  # where the number of the last push that was applied is; the signal is at 0
_PATIENCE = 60.0  # between looks at the job while a writer writes
_AGAIN = 0.005  # seconds before a wait that another's loss has ended begins again


class KeyShare(NamedTuple):
    """What server ``server`` has of a tensor: ``nbytes`` at ``start``, in these buckets. It lies at a page."""

    server: int
    start: int
    nbytes: int
    buckets: tuple[Bucket, ...]


def shares(plan: StorePlan, tensor: int) -> list[KeyShare]:
    """Those of a tensor that shares no bucket, by server."""
    size, found = DTYPES[plan.tensors[tensor].dtype], []
    for server, buckets in enumerate(plan.buckets):
        mine = tuple(b for b in buckets if b.nbytes and b.first[0] == tensor)
        if mine:
            found.append(KeyShare(server, mine[0].first[1] * size, sum(b.nbytes for b in mine), mine))
    return found


def takes_writers(spec: StoreSpec) -> bool:
    """Whether a store is one of keys to which writers may push: each push is applied by itself, and waits for none."""
    return spec.keys and isinstance(spec.mode, Async)


class Wanted(msgspec.Struct, frozen=True):
    """A writer wants memory for pushes to ``tensor``, or to give it back: its ``number``-th. ``device``: over which."""

    number: int
    tensor: int
    device: str


class Given(msgspec.Struct, frozen=True):
    """The packed region; or else why there is none."""

    region: bytes = b""
    error: str = ""


class Writers:
    """The writers of ``store``, on this server. ``fail``: what becomes of an error: it ends the job."""

    def __init__(self, store: KeyServer, fail: Callable[[BaseException], None]) -> None:
        self._store, self._fail = store, fail
        self._member: Member = store.member
        self._regions: dict[tuple[str, int], Region] = {}
        self._lock = threading.Lock()
        self._closed = False
        client = self._member.client
        client.answer(topic(store.name, "write"), self._give, slow=True)  # pages are touched
        client.on_told(topic(store.name, "written"), self._take_back)
        self._forget_left = client.on_reader_left(self._left)

    # ---- regions come and go

    def _give(self, writer: str, word: bytes) -> bytes:
        try:
            wanted = msgspec.msgpack.decode(word, type=Wanted)
            mine = [each for each in shares(self._store.plan, wanted.tensor) if each.server == self._store.index]
            device = self._member.devices[wanted.device]
            region = device.allocate(PAGE + mine[0].nbytes)
            packed = region.remote("write").pack()
        except (TensorwireError, msgspec.MsgspecError, LookupError) as error:
            return msgspec.msgpack.encode(Given(error=str(error)))
        with self._lock:
            if self._closed:
                region.close()
            self._regions[writer, wanted.number] = region
        arguments = (region, mine[0])
        threading.Thread(target=self._serve, args=arguments, name=f"pushes of {writer}", daemon=True).start()
        return msgspec.msgpack.encode(Given(packed))

    def _take_back(self, writer: str, word: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError, KeyError):
            wanted = msgspec.msgpack.decode(word, type=Wanted)
            with self._lock:
                region = self._regions.pop((writer, wanted.number))
            region.close()

    def _left(self, writer: str) -> None:
        with self._lock:
            gone = [key for key in self._regions if key[0] == writer]
            regions = [self._regions.pop(key) for key in gone]
        for region in regions:
            region.close()

    # ---- in a thread for each region

    def _serve(self, region: Region, share: KeyShare) -> None:
        memory = memoryview(region)[PAGE:]
        first = share.buckets[0].shard
        slots = [memory[b.shard - first : b.shard - first + b.nbytes] for b in share.buckets]
        try:
            for number in count(1):
                self._wait(region, number)
                for bucket, slot in zip(share.buckets, slots, strict=True):
                    self._store.apply_of_writer(bucket.index, slot)
                region.store(DONE, number)
        except RegionClosed:
            return  # the writer is done with it, or gone
        except BaseException as error:
            self._fail(error)

    def _wait(self, region: Region, number: int) -> None:
        """Returns when the writer has sent the push of that number. Raises `RegionClosed` or `JobEnded`."""
        while True:
            try:
                region.wait(0, number, _PATIENCE)
                return
            except WaitTimeout:
                self._member.check()
            except PeerLost:  # some peer, which need not be this one
                self._member.check()
                time.sleep(_AGAIN)

    def close(self) -> None:
        """The store has ended. What has come is applied, or never will be."""
        client = self._member.client
        client.answer(topic(self._store.name, "write"), None)
        client.on_told(topic(self._store.name, "written"), None)
        self._forget_left()
        with self._lock:
            self._closed = True
            regions, self._regions = list(self._regions.values()), {}
        for region in regions:
            region.close()
