"""Which snapshot buffer is in which state. It has no memory and no threads.

``free -> filling -> published -> draining -> free``: a cut fills a free buffer; what is filled is published, and the
one published before is drained; it is free again once no reader has it any more.
"""

from __future__ import annotations

from enum import Enum


class BufferState(Enum):
    """What a snapshot buffer is for at the moment."""

    FREE = "free"
    FILLING = "filling"  # by a cut, or reserved for the next one
    PUBLISHED = "published"  # the version that readers get
    DRAINING = "draining"  # an earlier version, which readers may still have


class Buffers:
    """``count`` buffers, all free. Every change raises `ValueError` where the state does not allow it."""

    def __init__(self, count: int) -> None:
        self.states = [BufferState.FREE] * count

    @property
    def published(self) -> int | None:
        """The buffer that readers get; None: there is no version yet."""
        return self._first(BufferState.PUBLISHED)

    @property
    def draining(self) -> list[int]:
        """Those that may become free."""
        return [number for number, state in enumerate(self.states) if state is BufferState.DRAINING]

    def fill(self) -> int | None:
        """Reserves a free buffer; None: there is none."""
        if self._first(BufferState.FILLING) is not None:
            raise ValueError("one version at a time is filled")
        number = self._first(BufferState.FREE)
        if number is not None:
            self.states[number] = BufferState.FILLING
        return number

    def publish(self, number: int) -> None:
        """Readers get this buffer from now on."""
        before = self.published
        self._change(number, BufferState.FILLING, BufferState.PUBLISHED)
        if before is not None:
            self._change(before, BufferState.PUBLISHED, BufferState.DRAINING)

    def drained(self, number: int) -> None:
        """No reader has this buffer any more."""
        self._change(number, BufferState.DRAINING, BufferState.FREE)

    def _first(self, state: BufferState) -> int | None:
        return self.states.index(state) if state in self.states else None

    def _change(self, number: int, before: BufferState, after: BufferState) -> None:
        if self.states[number] is not before:
            raise ValueError(f"buffer {number} is {self.states[number].value}, not {before.value}")
        self.states[number] = after
