"""The striped edge: a large tensor in stripes, one a lane, each with its own arrival word.

One lane, such as a queue pair, may not fill the link. A stripe is whole when its own word says so: nothing is assumed
of the order between lanes. The slot and its credit stay one: it is filled, seen and given back as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tensorwire.device import Channel, Completion, RemoteView, View
from tensorwire.edge.static import DEFAULT_TIMEOUT, Consumer, Producer, Word
from tensorwire.errors import ArgumentError

STRIPED_FROM = 8 << 20  # bytes; below, a second signal costs more than a second lane gives
_GRAIN = 4096  # stripes begin at multiples: no two of them share a page


def stripes(nbytes: int, lanes: int, at_least: int = STRIPED_FROM) -> int:
    """How many stripes a tensor of ``nbytes`` is for: one a lane from ``at_least`` bytes on, else one."""
    return lanes if nbytes >= max(at_least, lanes * _GRAIN) else 1


class StripedProducer(Producer):
    """A producer that cuts each slot into as many stripes as it has ``arrivals``; stripe ``i`` goes over lane ``i``.

    The other end is a `StripedConsumer` with as many arrival words. More stripes than lanes go round. Raises
    `ArgumentError` for an edge without arrival words or slots.
    """

    def __init__(
        self,
        channel: Channel,
        arrivals: Sequence[RemoteView],
        *,
        slots: Sequence[RemoteView],
        source: Sequence[View] = (),
        **options: Any,
    ) -> None:
        if not arrivals or not slots:
            raise ArgumentError("a striped edge needs slots, and an arrival word a stripe")
        super().__init__(channel, arrivals[0], slots=slots, source=source, **options)
        lanes = len(channel.lanes)
        self._stripes = [
            Producer(
                channel,
                arrival,
                slots=[slot.region.view(slot.offset + at, nbytes) for slot in slots],
                source=[view.region.view(view.offset + at, nbytes) for view in source],
                lane=i % lanes,
            )
            for i, (arrival, (at, nbytes)) in enumerate(zip(arrivals, _cut(self.nbytes, len(arrivals)), strict=True))
        ]

    def slot(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> memoryview:
        memory = super().slot(step, timeout)
        for stripe in self._stripes:
            stripe.slot(step, timeout)  # its bytes may still be on their way
        return memory

    def send(self, step: int, *, nbytes: int | None = None) -> Completion:
        """Returns the completion of the last stripe: others may still be on their way."""
        if nbytes is not None:
            raise ArgumentError("a striped edge sends the whole of its slot")
        self._check(step)
        self._last = step
        return [stripe.send(step) for stripe in self._stripes][-1]

    def flush(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        for stripe in self._stripes:
            stripe.flush(timeout)


class StripedConsumer(Consumer):
    """A consumer that waits for every stripe. The other end is a `StripedProducer`."""

    def __init__(self, arrivals: Sequence[Word], **options: Any) -> None:
        if not arrivals:
            raise ArgumentError("a striped edge needs an arrival word a stripe")
        super().__init__(arrivals[0], **options)
        self._others = list(arrivals[1:])

    def receive(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> memoryview | None:
        end = time.monotonic() + timeout
        slot = super().receive(step, timeout)
        for arrival in self._others:
            arrival.wait(step, max(0.0, end - time.monotonic()))
        return slot

    def ready(self, step: int) -> bool:
        return super().ready(step) and all(arrival.value >= step for arrival in self._others)


def _cut(nbytes: int, parts: int) -> list[tuple[int, int]]:
    """Where each part begins and how long it is; the last ones may be empty."""
    most = -(-nbytes // (parts * _GRAIN)) * _GRAIN
    return [(min(i * most, nbytes), min(most, nbytes - min(i * most, nbytes))) for i in range(parts)]
