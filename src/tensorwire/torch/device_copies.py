"""All copies of a store between accelerators and the memory that its servers reach, and which way they go."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from tensorwire._native import Window
from tensorwire.errors import WaitTimeout
from tensorwire.observe import counters
from tensorwire.progress import progress
from tensorwire.store.rules import pieces_over
from tensorwire.store.sharding import Bucket, StorePlan
from tensorwire.store.store_client import StoreClient
from tensorwire.torch.crossings import Crossing, Lane, Streams, Values
from tensorwire.torch.page_locking import PageLocks, page_locked

_LARGE = 1 << 30  # bytes that drivers may take seconds for


class Way:
    """Gradients' way down, or values' way up. ``coded``: what goes there is made of what arrives here.

    Attributes:
        direct: Whether the driver page-locks the memory that servers map, all of ``windows``.
    """

    def __init__(
        self,
        what: str,
        kind: str,
        plan: StorePlan,
        windows: Sequence[Window],
        *,
        read_only: bool = False,
        coded: bool = False,
    ) -> None:
        self._what, self.locks = what, PageLocks(kind)
        areas = [(window.address + at, nbytes) for _, at, _, nbytes in plan.runs() for window in windows]
        self.direct = not coded and all(self.locks.lock(*area, read_only=read_only) for area in areas)
        if not self.direct:
            self.locks.close()

    def describe(self) -> str:
        """For people."""
        if self.direct:
            return f"{self._what} directly"
        return f"{self._what} by one copy more, because {self.locks.refusal or 'they are coded here'}"


class DeviceCopies:
    """All copies of one store. ``params``: the parameters, of which some are on devices, contiguous.

    Where the driver does not page-lock the memory that servers map, copies take another one, through memory that is.
    """

    def __init__(self, client: StoreClient, params: Sequence[torch.Tensor]) -> None:
        self._client = client
        self._lanes = {d: Lane(d) for d in dict.fromkeys(p.device for p in params) if d.type != "cpu"}
        self._windows = client.shown_windows()
        self._first = next(iter(self._lanes))
        large = client.plan.space_bytes >= _LARGE
        doing = progress(f"page-locking memory for {self._first.type}") if large else contextlib.nullcontext()
        with doing, torch.accelerator.device_index(self._first.index):
            self._down = Way("gradients", self._first.type, client.plan, [client.gradients], coded=not client.births)
            self._up = Way("values", self._first.type, client.plan, self._windows, read_only=True)
        memory, locks = (client.gradients, self._windows), (self._down.locks, self._up.locks)
        self._end = weakref.finalize(self, _end, os.getpid(), list(self._lanes.values()), locks, memory)
        self._end.atexit = False  # the process ends anyway
        # Not detach(): copies up are no changes of the parameters' own version count before `Shown.show`.
        self._flat = [p.data.view(-1) if p.device in self._lanes else None for p in params]
        self._crossings = {b.number: self._of_bucket(b) for b in client.order}
        self._issued: dict[int, int] = {}  # by bucket: of which version its copies up have begun
        self._issuing, self._lock = threading.Lock(), threading.Lock()
        self._changed = threading.Condition(self._lock)  # entered by its lock: an interrupt leaves that free
        self._error: BaseException | None = None

    def _of_bucket(self, bucket: Bucket) -> list[Crossing]:
        devices = dict.fromkeys(f.device for piece in bucket.pieces if (f := self._flat[piece.tensor]) is not None)
        slot = self._client.memory(bucket)
        shown = [memoryview(w)[bucket.space : bucket.space + bucket.nbytes] for w in self._windows]
        values = shown
        if devices and not (self._down.direct and self._up.direct):
            # Both ways may share it: a bucket goes down when its last copy up is done, and up after it was sent.
            between: memoryview = page_locked(bucket.nbytes).numpy().data
            slot = slot if self._down.direct else between
            values = shown if self._up.direct else [between] * len(shown)
        return [self._crossing(self._lanes[device], bucket, slot, values, shown) for device in devices]

    def _crossing(
        self,
        lane: Lane,
        bucket: Bucket,
        slot: memoryview,
        values: Sequence[memoryview],
        shown: Sequence[memoryview],
    ) -> Crossing:
        numbers, params = [], []
        for n, piece in enumerate(bucket.pieces):
            flat = self._flat[piece.tensor]
            if flat is not None and flat.device == lane.device:
                numbers.append(n)
                params.append(flat[piece.start : piece.stop])
        over = partial(pieces_over, self._client.plan, pieces=[bucket.pieces[n] for n in numbers])
        return Crossing(lane, bucket, numbers, params, over(slot), list(map(over, values)), list(map(over, shown)))

    def describe(self) -> str:
        """How copies go, for people."""
        devices = ", ".join(map(str, self._lanes))
        return f"from and to {devices}: {self._down.describe()}; {self._up.describe()}"

    def crosses(self, bucket: Bucket) -> bool:
        """Whether anything of a bucket is on a device."""
        return bool(self._crossings[bucket.number])

    def enter_thread(self) -> None:
        """Before the first copy of a thread: it works with a device of ours, and not with the first of the machine."""
        torch.accelerator.set_device_index(self._first.index)

    # ---- gradients

    def currents(self) -> list[torch.Stream]:
        """The streams on which this thread computes, of all devices."""
        return [lane.current for lane in self._lanes.values()]

    def down(self, bucket: Bucket, values: Values, streams: Streams) -> None:
        """Begins to copy a bucket's gradients, which ``streams`` make, into its slot. The slot has to be free."""
        for crossing in self._crossings[bucket.number]:
            crossing.down(values, streams)

    def landed(self, bucket: Bucket) -> None:
        """Returns when a bucket may be sent: its gradients are in its slot, and its last values on the devices."""
        for crossing in self._crossings[bucket.number]:
            crossing.landed()
            if not self._down.direct:
                for n, here, present in zip(crossing.pieces, crossing.slots, crossing.present, strict=True):
                    if present:
                        self._client.copy(bucket, n, here)

    def end_step(self) -> None:
        """The stream that trains has used parameters and gradients for the last time in this step."""
        for lane in self._lanes.values():
            lane.end_step()

    # ---- values

    def up(self, bucket: Bucket, version: int) -> None:
        """Begins to copy a bucket's values of a version, which have come, into the parameters. Idempotent."""
        with self._issuing:
            if self._is_issued(bucket, version):  # the thread that trains may be ahead of the other
                return
            buffer = version % len(self._windows)
            for crossing in self._crossings[bucket.number]:
                if not self._up.direct:
                    _copy(crossing, buffer)
                crossing.up(version, buffer)
            self._issued[bucket.number] = version
        with self._lock:
            self._changed.notify_all()

    def wait(self, bucket: Bucket, version: int) -> None:
        """Returns when copies up of a version have begun, in another thread. Raises what came of that thread.

        `WaitTimeout`: they did not begin in time; what is on its way stays so.
        """
        if self._is_issued(bucket, version):
            return
        counters.add(host_waits=1)
        with self._lock:
            # That thread has a limit of its own, with a better message.
            came = self._changed.wait_for(partial(self._is_over, bucket, version), 2 * self._client.timeout)
            error = self._error
        if error is not None:
            raise error
        if not came:
            raise WaitTimeout(f"no copy of {self._client.name} to a device began in time: is a device busy?")

    def _is_issued(self, bucket: Bucket, version: int) -> bool:
        return self._issued.get(bucket.number, -1) >= version

    def _is_over(self, bucket: Bucket, version: int) -> bool:
        return self._error is not None or self._is_issued(bucket, version)

    def fail(self, error: BaseException) -> None:
        """A thread cannot go on: who waits for it raises this."""
        with self._lock:
            self._error = error
            self._changed.notify_all()

    def recover(self) -> bool:
        """Whether a thread has failed since; it is forgotten, because what it did is begun again."""
        with self._lock:
            error, self._error = self._error, None
            return error is not None

    def join(self, buckets: Iterable[Bucket]) -> None:
        """What this thread computes from now on comes after the last copies up."""
        for bucket in buckets:
            for crossing in self._crossings[bucket.number]:
                crossing.join()

    # ---- the end

    def settle(self) -> None:
        """Returns when all copies that have begun are done: others may now write where they read."""
        _settle(self._lanes.values())

    def close(self) -> None:
        """Waits for all copies, and unlocks memory. Idempotent."""
        self._end()


def _copy(crossing: Crossing, buffer: int) -> None:
    """Values into the page-locked memory, which the last copies down and up are done with."""
    for room, value in zip(crossing.values[buffer], crossing.shown[buffer], strict=True):
        room.copy_(value)
        counters.add(copies=1, copied_bytes=room.nbytes)


def _settle(lanes: Iterable[Lane]) -> None:
    for lane in lanes:
        lane.down.synchronize()
        lane.up.synchronize()


def _end(pid: int, lanes: Sequence[Lane], locks: Sequence[PageLocks], *_memory: object) -> None:
    """``_memory`` is unmapped after this."""
    if os.getpid() != pid:  # a forked child has nothing on devices
        return
    try:
        _settle(lanes)
    finally:
        for each in locks:
            each.close()
