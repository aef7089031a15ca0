"""A shard's part of versions: at a cut its buckets are copied into the version's file, before they change.

A thread copies bucket by bucket as soon as there is a cut; whoever is about to change a bucket that is not there yet
copies it first. So a cut costs one copy, and nothing is copied without one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tensorwire._native import copy_is_large, gather
from tensorwire.control import Member
from tensorwire.device.mapped import unmap
from tensorwire.edge import Consumer, Producer
from tensorwire.errors import JobEnded, PeerLost, RegionClosed, WaitTimeout
from tensorwire.observe import counters, failpoints
from tensorwire.store.endpoints import find
from tensorwire.store.sharding import Bucket, StorePlan
from tensorwire.store.versions.cuts import Cut, CutReport, report_bytes, unpack_cut
from tensorwire.store.versions.handover import PUBLISHER
from tensorwire.store.versions.shard_parts import Rooms, find_parts
from tensorwire.store.versions.version_layout import VersionLayout

_PATIENCE = 60.0  # between looks at the job while nobody makes a cut


class ShardValues(NamedTuple):
    """A shard's parameters, ``buffers`` times: ``of(n % buffers, bucket)`` has the bytes of a bucket in round ``n``."""

    of: Callable[[int, Bucket], npt.NDArray[np.uint8]]
    buffers: int = 1


class Moments(NamedTuple):
    """Where there are no common rounds: ``at_rest()``, in which no bucket changes, and the updates that one had."""

    at_rest: Callable[[], AbstractContextManager[object]]
    updates: Callable[[int], int]


class _Filling:
    """A cut that is not whole yet: the buckets that nobody copies, and those that somebody does."""

    def __init__(self, cut: Cut, buckets: int) -> None:
        self.cut, self.to_do, self.under_way = cut, set(range(buckets)), set[int]()


class Snapshots:
    """The snapshots of one shard of store ``name``.

    Args:
        member: This server.
        name: The store's name.
        plan: Its plan.
        shard: The number of the shard.
        values: The shard's parameters.
        count: How many snapshot buffers there are.
        cuts: The cuts, from worker 0. None: whoever has one calls `take`.
        moments: None where all workers have their rounds together.

    Raises:
        OutOfMemory: The versions are on another machine, and a copy of the shard does not fit here.
    """

    def __init__(
        self,
        member: Member,
        name: str,
        plan: StorePlan,
        shard: int,
        values: ShardValues,
        count: int,
        cuts: Consumer | None,
        moments: Moments | None,
    ) -> None:
        self._member, self._cuts, self._moments = member, cuts, moments
        buckets, nbytes = plan.buckets[shard], plan.shard_bytes[shard]
        self._shard, self._rounds, self._large = shard, values.buffers, copy_is_large(nbytes)
        self._buckets = len(buckets)
        layout = VersionLayout(plan, by_bucket=moments is not None)
        places = [layout.places(bucket) for bucket in buckets]
        self._sources: list[Rooms] = [
            [
                [values.of(n, bucket)[p.shard - bucket.shard :][: p.nbytes] for p in mine]
                for bucket, mine in zip(buckets, places, strict=True)
            ]
            for n in range(values.buffers)
        ]
        self._parts = find_parts(member, name, shard, places, (layout.nbytes, nbytes), count)
        self._open_report(name)
        self._completed, self._taken, self._closed = 0, 0, False
        self._filling: _Filling | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"{name} snapshots {shard}", daemon=True)
        self._thread.start()

    def _open_report(self, name: str) -> None:
        channel = self._member.channel(PUBLISHER)
        self._channel = channel
        self._theirs, _ = find(self._member, f"{name}/report {self._shard}", PUBLISHER)
        nbytes = report_bytes(self._buckets)
        self._staging = None if channel.device.capabilities.maps else channel.device.allocate(nbytes)
        self._reports = Producer(
            channel,
            self._theirs.view(0, 8),
            slots=[self._theirs.view(8, nbytes)],
            source=[] if self._staging is None else [self._staging.view()],
        )
        self._report = CutReport(self._reports.memory, self._buckets)

    # ---- what the mode tells

    def completed(self, round: int) -> None:
        """All buckets have the version of a common round."""
        with self._changed:
            self._completed = round
            self._changed.notify_all()

    def before_round(self, round: int) -> None:
        """Worker 0 has begun the common round ``round``: a cut that it made before is there, or one that is of this."""
        counter = self._taken + 1
        if self._cuts is not None and self._cuts.ready(counter) and (cut := self._cut(counter, 0.0)).round < round:
            self.take(cut)

    def before_write(self, bucket: int, round: int = 0) -> None:
        """A bucket is about to change where round ``round`` has its place. The caller keeps others from it."""
        filling = self._filling
        if filling is not None and (round - filling.cut.round) % self._rounds == 0:
            self._copy_once(filling, bucket)

    @property
    def filling(self) -> bool:
        """Whether there is a cut that is not whole yet."""
        return self._filling is not None

    # ---- a cut

    def _run(self) -> None:
        counter = 1
        while True:
            try:
                self._begin(counter)
                self._fill()
                counter += 1
            except WaitTimeout:
                if self._member.client.ended.is_set():
                    return
            except (JobEnded, PeerLost, RegionClosed):
                return  # the end of the store, or one whose cause others tell
            except Exception as error:
                self._member.fail(f"stopped: cannot make a version: {type(error).__name__}: {error}")
                return

    def _cut(self, counter: int, timeout: float) -> Cut:
        """It stays there until this shard has reported of it."""
        assert self._cuts is not None
        block = self._cuts.receive(counter, timeout)
        assert block is not None
        return unpack_cut(block)

    def _begin(self, counter: int) -> None:
        """Returns when the cut of that number has been taken."""
        cut = None if self._cuts is None else self._cut(counter, _PATIENCE)
        with self._changed:
            if cut is None:
                self._changed.wait_for(lambda: self._closed or self._taken >= counter)
            elif self._moments is None:
                self._changed.wait_for(lambda: self._closed or self._completed >= cut.round)
            if self._closed:
                raise RegionClosed("the store has ended")
        if cut is not None:
            self.take(cut)

    def _fill(self) -> None:
        filling = self._filling
        assert filling is not None
        cut = filling.cut
        for bucket in range(self._buckets):
            self._copy_once(filling, bucket)
            checksum = xxhash.xxh3_64()  # here, whoever has copied it: no update waits for this
            for part in self._parts.room(cut.buffer, bucket):
                checksum.update(part.data)
            self._report.checksums[bucket] = checksum.intdigest()
        self._parts.arrived()
        self._filling = None
        if failpoints.listener is not None:
            failpoints.reach("primary", self._shard, cut.counter, "filled")
        self._reports.slot(cut.counter)
        self._reports.send(cut.counter)

    def take(self, cut: Cut) -> None:
        """From now on the state is kept as it is, bucket by bucket, until it has been copied."""
        with contextlib.nullcontext() if self._moments is None else self._moments.at_rest(), self._changed:
            if self._taken >= cut.counter:
                return  # another thread has taken it
            self._report.begin(cut)
            if self._moments is not None:
                self._report.updates[:] = [self._moments.updates(bucket) for bucket in range(self._buckets)]
            self._filling = _Filling(cut, self._buckets)
            self._taken = cut.counter  # last: `before_round` looks at it without the lock, and then writes
            self._changed.notify_all()

    def _copy_once(self, filling: _Filling, bucket: int) -> None:
        """Returns when the bucket has been copied."""
        with self._changed:
            self._changed.wait_for(lambda: bucket not in filling.under_way)
            if bucket not in filling.to_do:
                return
            filling.to_do.discard(bucket)
            filling.under_way.add(bucket)
        self._copy(filling.cut, bucket)
        with self._changed:
            filling.under_way.discard(bucket)
            self._changed.notify_all()

    def _copy(self, cut: Cut, bucket: int) -> None:
        sources = self._sources[cut.round % self._rounds][bucket]
        for source, target in zip(sources, self._parts.room(cut.buffer, bucket), strict=True):
            gather(target, source, self._large)
            counters.add(copies=1, copied_bytes=source.nbytes)
        self._parts.filled(cut.buffer, bucket)

    def close(self) -> None:
        """The store has ended: no cut follows. Call it when its memory is closed, which ends the thread's wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._staging is not None:
            self._staging.close()
        self._parts.close()
        unmap(self._channel, self._theirs)
