"""One bucket's copies between accelerators and the memory that a store's servers reach.

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

import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from tensorwire.errors import Unsupported
from tensorwire.store.sharding import Bucket

Values = Sequence["torch.Tensor | None"] | Mapping[int, "torch.Tensor | None"]
Streams = Iterable[torch.Stream]
_NAP = 50e-6  # seconds


def refuse_capture(stream: torch.Stream) -> None:
    """Raises `Unsupported` where a graph of kernels is captured on ``stream``: its replays would copy nothing."""
    if hasattr(stream, "is_capturing") and stream.is_capturing():
        raise Unsupported(
            "a graph of the device's kernels is being captured, whose replays would neither push gradients nor wait "
            "for parameters: use overlap=False"
        )


def wait_asleep(event: torch.Event) -> None:
    """Waits for an event without burning a core that servers need, as ``event.synchronize()`` does on CUDA."""
    while not event.query():
        time.sleep(_NAP)


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

    ``pieces``: their numbers in the bucket. ``params``: their places there. ``slots``, ``values``: their places here,
    for gradients, and for values by buffer. ``shown``: by buffer, where values come from, if not from there.
    """

    def __init__(
        self,
        lane: Lane,
        bucket: Bucket,
        pieces: Sequence[int],
        params: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
        values: Sequence[Sequence[torch.Tensor]],
        shown: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        self.lane, self.pieces, self._params, self.slots = lane, pieces, params, slots
        self.values, self.shown = values, shown
        self._pieces = [bucket.pieces[n] for n in pieces]
        self._copied, self._came = torch.Event(lane.device), torch.Event(lane.device)
        self._version = 0
        self._joined: dict[int, int] = {}  # by stream: the last version whose copy up it waits for
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
        wait_asleep(self._copied)

    def wait_for_values(self) -> None:
        """Waits for the last copy up."""
        wait_asleep(self._came)

    def up(self, version: int, buffer: int) -> None:
        """Begins to copy the values of a version, which are in ``buffer``, into the parameters."""
        self.wait_for_use()
        with self.lane.up:
            for param, value in zip(self._params, self.values[buffer], strict=True):
                param.copy_(value, non_blocking=True)
        self._came.record(self.lane.up)
        self._version = version

    def wait_for_use(self) -> None:
        """What follows on the stream up comes after the last use of the parameters."""
        self.lane.up.wait_event(self.lane.used)

    def join(self) -> None:
        """What this thread computes from now on comes after the last copy up."""
        stream, version = self.lane.current, self._version
        if self._joined.get(stream.stream_id) != version:
            refuse_capture(stream)
            stream.wait_event(self._came)
            self._joined[stream.stream_id] = version
