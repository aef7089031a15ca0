"""The publisher of a store's versions: a thread of the server that has shard 0.

It grants worker 0 a buffer for the next version, waits for the reports of all shards, writes the file's header, and
publishes the file. Where it needs a buffer, it drains that of the oldest version.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from tensorwire.control import Member
from tensorwire.control.names import member_name
from tensorwire.device import Region
from tensorwire.edge import Consumer, Producer, Word
from tensorwire.errors import DeviceError, JobEnded, PeerLost, ProtocolError, RegionClosed
from tensorwire.observe import failpoints
from tensorwire.store.admission import check_memory
from tensorwire.store.endpoints import show
from tensorwire.store.sharding import StorePlan
from tensorwire.store.versions.buffers import Buffers, BufferState
from tensorwire.store.versions.cuts import Cut, CutReport, granted, held, report_bytes
from tensorwire.store.versions.events import Events
from tensorwire.store.versions.handover import Announcement, Giver, announce
from tensorwire.store.versions.listing import Listing, VersionState, topic
from tensorwire.store.versions.readers import Readers
from tensorwire.store.versions.shard_parts import buffer_name
from tensorwire.store.versions.version_files import JobFolder, VersionFiles, map_buffer, write_header
from tensorwire.store.versions.version_layout import Manifest, Version, VersionLayout

_LOOKS = (0.001, 0.05)  # seconds between looks whether readers have let go of a buffer: at first, and at most


class Publisher:
    """Publishes versions of store ``name`` from ``count`` snapshot buffers.

    ``grant``, ``asked``: the edges to those words of worker 0. ``by_bucket``: as for `VersionLayout`.

    Raises `OutOfMemory` where the buffers do not fit.
    """

    def __init__(
        self,
        member: Member,
        name: str,
        plan: StorePlan,
        count: int,
        grant: Producer,
        asked: Producer,
        *,
        by_bucket: bool,
    ) -> None:
        self._member, self._name, self._plan, self._grant = member, name, plan, grant
        self._asked, self._requests = asked, itertools.count(1)
        member.client.on_told(topic(name, "ask"), self._ask)
        member.client.answer(topic(name, "list"), self._list)
        self._events = Events(member, name)
        self._layout = VersionLayout(plan, by_bucket=by_bucket)
        self._by_bucket, self._buffers = by_bucket, Buffers(count)
        check_memory(count * self._layout.nbytes, f"{name}, for versions of it,")
        client = member.client
        folder = JobFolder.open(client.welcome.job, client.address, client.secret)
        self.files = VersionFiles(folder, name, self._layout.nbytes, count)
        memory = [map_buffer(fd, self._layout.nbytes) for fd in self.files.descriptors]
        self._heads = [each[: self._layout.data] for each in memory]
        self._last: list[Version | None] = [None] * count  # by buffer: what was published last from it
        self._readers = Readers(member, name, memory, self._events)
        self._giver = Giver(name, Path(f"{self.files.path}.socket"), self.files.descriptors)
        self._closed = threading.Event()
        self._regions: list[Region] = []
        checkpoints = os.environ.get("TENSORWIRE_CHECKPOINTS", "")
        path = str(self.files.path)
        announce(member, Announcement(name, member.where, path, f"{path}.socket", checkpoints))
        self._consumers: list[Consumer] = []
        self._reports: list[CutReport] = []
        self._thread = threading.Thread(target=self._run, args=(name,), name=f"{name} publisher", daemon=True)
        self._thread.start()

    def _open(self, name: str) -> None:
        """Gives every shard memory for its reports, and those on other machines that of the buffers."""
        for shard, buckets in enumerate(self._plan.buckets):
            server = member_name("server", self._plan.server_of(shard))
            channel = self._member.channel(server)
            nbytes = report_bytes(len(buckets))
            region = channel.device.allocate(8 + nbytes)
            self._regions.append(region)
            memory = memoryview(region)[8:]
            self._consumers.append(Consumer(Word(region, 0, channel), slots=[memory]))
            self._reports.append(CutReport(memory, len(buckets)))
            show(self._member, f"{name}/report {shard}", server, region)
            if not channel.device.capabilities.maps:
                for number, buffer in enumerate(self._readers.buffers(channel.device)):
                    show(self._member, buffer_name(name, number, shard), server, buffer)

    def _run(self, name: str) -> None:
        try:
            self._open(name)
            for counter in itertools.count(1):
                self._grant_buffer(counter)
                self._publish(self._collect(counter))
        except (JobEnded, PeerLost, RegionClosed):
            return  # the end of the store, or one whose cause others tell
        except Exception as error:
            if not self._closed.is_set():
                self._member.fail(f"stopped: cannot publish a version: {type(error).__name__}: {error}")

    def _ask(self, *_: object) -> None:
        with contextlib.suppress(DeviceError):  # worker 0 is gone
            self._asked.send(next(self._requests))

    def _list(self, *_: object) -> bytes:
        pairs = zip(self._last, self._buffers.states, strict=True)
        kept = [(v, s.value) for v, s in pairs if v and s in (BufferState.PUBLISHED, BufferState.DRAINING)]
        kept.sort(key=lambda pair: -pair[0].counter)
        found = Listing([VersionState(str(v), v.step, state) for v, state in kept], self._readers.states)
        return msgspec.msgpack.encode(found)

    # ---- one version

    def _grant_buffer(self, counter: int) -> None:
        """Tells worker 0 where version ``counter`` may go, once there is a place."""
        buffer = self._free_buffer()
        if buffer is None:
            self._grant.send(held(counter))
        seconds, most = _LOOKS
        while buffer is None:
            if self._closed.wait(seconds):
                raise RegionClosed("the store has ended")
            self._member.check()
            seconds = min(2 * seconds, most)
            buffer = self._free_buffer()
        self._grant.send(granted(counter, buffer))

    def _free_buffer(self) -> int | None:
        """One for the next version: an earlier version keeps its name until its buffer is needed."""
        if (free := self._buffers.fill()) is not None:
            return free
        oldest_first = sorted((self._last[n].counter, n) for n in self._buffers.draining)  # type: ignore[union-attr]
        for counter, number in oldest_first:
            self.files.withdraw(number)
            if not self._readers.hold(number, counter) and self.files.take(number):
                self._readers.withdraw(number)
                self._buffers.drained(number)
                return self._buffers.fill()
        return None

    def _collect(self, counter: int) -> Cut:
        """Waits until every shard has filled its part of version ``counter``."""
        for consumer in self._consumers:
            self._member.outwait(partial(consumer.receive, counter))
        cuts = {report.cut for report in self._reports}
        if len(cuts) > 1:
            raise ProtocolError(f"shards report different cuts: {cuts}")
        return cuts.pop()

    def _publish(self, cut: Cut) -> None:
        checksums, updates = self._by_number("checksums"), self._by_number("updates")
        manifest = Manifest(
            cut.run, cut.counter, cut.step, checksums, updates if self._by_bucket else (), time.time_ns()
        )
        write_header(self._heads[cut.buffer], self._layout.header(manifest))
        self.files.publish(cut.buffer, cut.counter, manifest.time)
        self._last[cut.buffer] = manifest.version
        self._readers.announce(cut.counter, cut.buffer)
        self._buffers.publish(cut.buffer)
        self._events.add(f"version {manifest.version} of step {cut.step:,}")
        if failpoints.listener is not None:
            failpoints.reach("primary", 0, cut.counter, "version_published")

    def _by_number(self, what: str) -> tuple[int, ...]:
        """What the shards report of their buckets, by the buckets' numbers."""
        found = [0] * sum(map(len, self._plan.buckets))
        for report, buckets in zip(self._reports, self._plan.buckets, strict=True):
            numbers: Sequence[int] = getattr(report, what).tolist()
            for bucket, number in zip(buckets, numbers, strict=True):
                found[bucket.number] = number
        return tuple(found)

    def close(self) -> None:
        """The store has ended: readers find no version of it any more. Who has one open keeps it."""
        self._closed.set()
        for what in ("ask", "list"):
            self._member.client.on_told(topic(self._name, what), None)
        self._events.close()
        self._giver.close()
        for region in self._regions:
            region.close()
        self._thread.join()
        self._readers.close()
        self.files.close()
