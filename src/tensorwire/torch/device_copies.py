"""Copies between accelerators and the memory that a store's servers reach.

Gradients go down to the slots of their buckets, and new values come up into the parameters, each on a stream of its
own, so that neither holds up the computation. What has to wait for what:

1. a copy down waits for the streams that made the gradients;
2. a bucket is sent when its copies down are done;
3. gradients are kept until then by who pushes them, and the stream that trains goes on after the copies down;
4. a slot is filled when its server has read what was there;
5. a copy up waits for what used the parameters in the step before;
6. every stream that reads a parameter waits for its copy up;
7. a bucket is sent when its last copy up is done, because its server may then write the next value.

Only 2, 4 and 7 stop a thread. With ``overlap`` that thread is not the one that trains.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from tensorwire.errors import Unsupported, WaitTimeout
from tensorwire.observe import counters
from tensorwire.store.rules import tensor_over
from tensorwire.store.sharding import Bucket
from tensorwire.store.store_client import StoreClient
from tensorwire.torch.page_locking import PageLocks, page_locked

Values = Sequence["torch.Tensor | None"] | Mapping[int, "torch.Tensor | None"]
Streams = Iterable[torch.Stream]


def refuse_capture(stream: torch.Stream) -> None:
    """Raises `Unsupported` where a graph of kernels is captured on ``stream``: its replays would copy nothing."""
    if hasattr(stream, "is_capturing") and stream.is_capturing():
        raise Unsupported(
            "a graph of the device's kernels is being captured, whose replays would neither push gradients nor wait "
            "for parameters: use overlap=False"
        )


class Lane:
    """A device's two streams for copies, and the last use of its parameters."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down, self.up = torch.Stream(device), torch.Stream(device)
        self.used = torch.Event(device)

    @property
    def current(self) -> torch.Stream:
        """The stream on which this thread computes there."""
        return torch.accelerator.current_stream(self.device)

    def end_step(self) -> None:
        """This thread's stream has used parameters and gradients for the last time in this step."""
        self.wait_for_copies()
        self.used.record(self.current)

    def wait_for_copies(self) -> None:
        """A gradient that is set to zero in place after this was copied before."""
        self.current.wait_stream(self.down)


class Crossing:
    """The pieces of one bucket whose parameters are on one device.

    ``pieces``: their numbers in the bucket. ``tensors``: those of their parameters. ``params``: their places there.
    ``slots``, ``values``: their places here, for gradients, and for values by buffer.
    """

    def __init__(
        self,
        lane: Lane,
        bucket: Bucket,
        pieces: Sequence[int],
        params: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
        values: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        self.lane, self.pieces, self._params, self.slots, self.values = lane, pieces, params, slots, values
        self._pieces = [bucket.pieces[n] for n in pieces]
        self._copied, self._came = torch.Event(lane.device), torch.Event(lane.device)
        self._joined: set[int] = set()  # streams that wait for the last copy up
        self.present: list[bool] = []

    def down(self, values: Values, streams: Streams) -> None:
        """Begins to copy what ``values`` has of this."""
        self.present = [values[piece.tensor] is not None for piece in self._pieces]
        self.wait_for_gradients(streams)
        self.lane.down.wait_event(self._came)
        with self.lane.down:
            for piece, slot in zip(self._pieces, self.slots, strict=True):
                value = values[piece.tensor]
                if value is not None:
                    slot.copy_(value[piece.start : piece.stop], non_blocking=True)
        self._copied.record(self.lane.down)

    def wait_for_gradients(self, streams: Streams) -> None:
        """What follows on the stream down comes after what was asked for on ``streams``."""
        for stream in streams:
            if stream.device_index == self.lane.down.device_index:
                self.lane.down.wait_stream(stream)

    def landed(self) -> None:
        """Returns when the bucket may be sent, as far as this goes: its gradients are here, its last values there."""
        if any(self.present):
            self.wait_for_copies()
        else:
            self.wait_for_values()

    def wait_for_copies(self) -> None:
        """Waits for the copies down, which come after the last copy up."""
        self._copied.synchronize()

    def wait_for_values(self) -> None:
        """Waits for the last copy up."""
        self._came.synchronize()

    def up(self, buffer: int) -> None:
        """Begins to copy the values in ``buffer`` into the parameters."""
        self.wait_for_use()
        with self.lane.up:
            for param, value in zip(self._params, self.values[buffer], strict=True):
                param.copy_(value, non_blocking=True)
        self._came.record(self.lane.up)
        self._joined.clear()

    def wait_for_use(self) -> None:
        """What follows on the stream up comes after the last use of the parameters."""
        self.lane.up.wait_event(self.lane.used)

    def join(self) -> None:
        """What this thread computes from now on comes after the last copy up."""
        stream = self.lane.current
        if stream.stream_id not in self._joined:
            refuse_capture(stream)
            stream.wait_event(self._came)
            self._joined.add(stream.stream_id)


class DeviceCopies:
    """All copies of one store. ``params``: the parameters, of which some are on devices, contiguous.

    Attributes:
        refusal: Why copies take another one here, in page-locked memory; empty: they need none.
    """

    def __init__(self, client: StoreClient, params: Sequence[torch.Tensor]) -> None:
        self._client = client
        self._lanes = {d: Lane(d) for d in dict.fromkeys(p.device for p in params) if d.type != "cpu"}
        kind = next(iter(self._lanes)).type
        self._windows = client.shown_windows()
        self._locks = PageLocks(kind)
        self._direct = client.births and self._lock()
        self.refusal = self._locks.refusal or ("" if self._direct else "gradients are coded here")
        # Not detach(): copies up are no changes of the parameters' own version count before `Part.show`.
        self._flat = [p.data.view(-1) if p.device in self._lanes else None for p in params]
        self._crossings = {b.number: self._of_bucket(b) for b in client.order}
        self._issued: dict[int, int] = {}  # by bucket: of which version its copies up have begun
        self._issuing, self._changed = threading.Lock(), threading.Condition()
        self._error: BaseException | None = None
        self.failed = False  # whether the thread that begins copies up has met an error since
        memory = (client.gradients, self._windows)
        self._end = weakref.finalize(self, _end, os.getpid(), list(self._lanes.values()), self._locks, memory)
        self._end.atexit = False  # the process ends anyway

    def _lock(self) -> bool:
        """Page-locks all memory that copies come from and go to; all or none."""
        areas = [(self._client.gradients, False), *((window, True) for window in self._windows)]
        for _, at, _, nbytes in self._client.plan.runs():
            for window, read_only in areas:
                if not self._locks.lock(window.address + at, nbytes, read_only=read_only):
                    self._locks.close()
                    return False
        return True

    def _of_bucket(self, bucket: Bucket) -> list[Crossing]:
        devices = dict.fromkeys(f.device for piece in bucket.pieces if (f := self._flat[piece.tensor]) is not None)
        slot = self._client.memory(bucket)
        shown = [memoryview(w)[bucket.space : bucket.space + bucket.nbytes] for w in self._windows]
        if devices and not self._direct:
            between: memoryview = page_locked(bucket.nbytes).numpy().data
            slot, shown = between, [between] * len(shown)
        return [self._crossing(self._lanes[device], bucket, slot, shown) for device in devices]

    def _crossing(self, lane: Lane, bucket: Bucket, slot: memoryview, shown: Sequence[memoryview]) -> Crossing:
        numbers, params = [], []
        for n, piece in enumerate(bucket.pieces):
            flat = self._flat[piece.tensor]
            if flat is not None and flat.device == lane.device:
                numbers.append(n)
                params.append(flat[piece.start : piece.stop])

        def over(memory: memoryview) -> list[torch.Tensor]:
            tensors, pieces = self._client.plan.tensors, [bucket.pieces[n] for n in numbers]
            return [tensor_over(memory, tensors[p.tensor].dtype, p.offset, p.stop - p.start) for p in pieces]

        return Crossing(lane, bucket, numbers, params, over(slot), [over(memory) for memory in shown])

    def describe(self) -> str:
        """How copies go, for people."""
        way = f"through page-locked memory, one copy more, because {self.refusal}" if self.refusal else "directly"
        return f"copied {way} to {', '.join(map(str, self._lanes))}"

    def crosses(self, bucket: Bucket) -> bool:
        """Whether anything of a bucket is on a device."""
        return bool(self._crossings[bucket.number])

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
            if not self._direct:
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
            if self._issued.get(bucket.number) == version:
                return
            buffer = version % len(self._windows)
            for crossing in self._crossings[bucket.number]:
                if not self._direct:
                    self._copy(bucket, crossing, buffer)
                crossing.up(buffer)
            self._issued[bucket.number] = version
        with self._changed:
            self._changed.notify_all()

    def _copy(self, bucket: Bucket, crossing: Crossing, buffer: int) -> None:
        """Values into the page-locked memory, which the last copies down and up are done with."""
        shown = memoryview(self._windows[buffer])[bucket.space : bucket.space + bucket.nbytes]
        for n, room in zip(crossing.pieces, crossing.values[buffer], strict=True):
            piece = bucket.pieces[n]
            dtype = self._client.plan.tensors[piece.tensor].dtype
            room.copy_(tensor_over(shown, dtype, piece.offset, piece.stop - piece.start))
            counters.add(copies=1, copied_bytes=room.nbytes)

    def wait(self, bucket: Bucket, version: int) -> None:
        """Returns when copies up of a version have begun, in another thread. Raises what came of that thread.

        `WaitTimeout`: they did not begin in time; what is on its way stays so.
        """
        if self._issued.get(bucket.number) == version:
            return
        counters.add(host_waits=1)
        with self._changed:
            # That thread has a limit of its own, with a better message.
            came = self._changed.wait_for(partial(self._is_issued, bucket, version), 2 * self._client.timeout)
            error, self._error = self._error, None
        if error is not None:
            raise error
        if not came:
            raise WaitTimeout(f"no copy of {self._client.name} to a device began in time: is a device busy?")

    def _is_issued(self, bucket: Bucket, version: int) -> bool:
        return self._error is not None or self._issued.get(bucket.number) == version

    def fail(self, error: BaseException) -> None:
        """A thread cannot go on: who waits for it raises this."""
        with self._changed:
            self._error, self.failed = error, True
            self._changed.notify_all()

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


def _settle(lanes: Iterable[Lane]) -> None:
    for lane in lanes:
        lane.down.synchronize()
        lane.up.synchronize()


def _end(pid: int, lanes: Sequence[Lane], locks: PageLocks, *_memory: object) -> None:
    """``_memory`` is unmapped after this."""
    if os.getpid() != pid:  # a forked child has nothing on devices
        return
    try:
        _settle(lanes)
    finally:
        locks.close()
