"""The ring under bounded and dynamic edges: slots that begin with a header, and go back in any order.

Both ends have memory of one layout: a word, ``depth`` records, and as many slots. The consumer's word is the *arrival*:
how many steps were sent. The producer's is the *credit*: how many slots came back, and its records say which ones. A
producer takes the slot that has been free for longest, so the consumer, who gave them back, knows which one comes next.
In order that is a ring; a slot that is kept for long is passed by.
"""

from __future__ import annotations

import collections
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tensorwire.device import Channel, Completion, RemoteView, View
from tensorwire.edge.header import HEADER, TEXT, Header, unpack
from tensorwire.edge.static import lane_of
from tensorwire.edge.tensor import check_step
from tensorwire.errors import ArgumentError, PeerLost, ProtocolError, RegionClosed, WaitTimeout

_RECORD = struct.Struct("<Q")
_LINE = 64  # bytes; words and slots begin at multiples, so that no two of them share a cache line


@dataclass(frozen=True, slots=True)
class Ring:
    """``depth`` slots for headers, each with room for ``bound`` bytes of payload; the same at both ends.

    ``depth``: how many steps may be sent and not yet given back, at least 1; whoever still holds the last tensor when
    it asks for the next one needs 2. Raises `ArgumentError`.
    """

    depth: int
    bound: int = 0

    def __post_init__(self) -> None:
        if self.depth < 1 or self.bound < 0:
            raise ArgumentError(f"a ring has 1 slot or more, of 0 bytes or more; not {self.depth} of {self.bound}")

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot: its header, and the payload or a short text."""
        return HEADER + _round(max(self.bound, TEXT))

    @property
    def words_nbytes(self) -> int:
        """Bytes in front of the slots: all that a producer needs whose channel maps the consumer's memory."""
        return _LINE + _round(_RECORD.size * self.depth)

    @property
    def nbytes(self) -> int:
        """Bytes of each end's memory."""
        return self.words_nbytes + self.depth * self.slot_nbytes

    def record(self, number: int) -> int:
        """Where the record of that credit lies."""
        return _LINE + _RECORD.size * (number % self.depth)

    def slot(self, slot: int) -> int:
        """Where a slot begins."""
        return self.words_nbytes + slot * self.slot_nbytes


def _round(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


def _check_memory(what: str, view: View | RemoteView, at_least: int) -> None:
    if view.nbytes < at_least or view.offset % _LINE:
        raise ArgumentError(
            f"the {what} of this ring is {at_least} bytes at a multiple of {_LINE}, "
            f"not {view.nbytes} at {view.offset}: is the ring the same at both ends?"
        )


class Flight:
    """One step that was sent. ``kept`` is what its consumer may still read; it goes when the slot comes back."""

    __slots__ = ("kept", "ring")

    def __init__(self, ring: RingProducer, kept: object) -> None:
        self.ring: RingProducer | None = ring
        self.kept = kept

    def landed(self) -> bool:
        """Whether the slot came back."""
        if self.ring is not None:
            self.ring.collect()
        return self.ring is None

    def land(self, timeout: float) -> None:
        """Waits until it does. Raises `PeerLost` or `WaitTimeout`."""
        ring = self.ring
        if ring is not None:
            ring.wait_until(lambda: self.ring is None, timeout)


class RingProducer:
    """The sending end. One thread at a time.

    ``memory``: where headers are written: the consumer's own memory where the channel maps it, else ``outbox``, whose
    slots ``send`` writes across.
    """

    def __init__(self, channel: Channel, inbox: RemoteView, outbox: View, ring: Ring) -> None:
        _check_memory("inbox", inbox, ring.nbytes)
        self.ring = ring
        self._inbox, self._outbox = inbox, outbox
        self._arrival = inbox.region.view(inbox.offset, 8)
        self.channel = lane_of(channel, self._arrival)
        mapped = self.channel.map(self._arrival)
        self.mapped = mapped is not None
        _check_memory("outbox", outbox, ring.words_nbytes if self.mapped else ring.nbytes)
        self._records = outbox.buffer
        self.memory = self._records if mapped is None else memoryview(mapped)[inbox.offset :][: ring.nbytes]
        self._free = collections.deque(range(ring.depth))
        self._flights: list[Flight | None] = [None] * ring.depth
        self._written: list[Completion | None] = [None] * ring.depth
        self._taken: int | None = None
        self._last = self._sent = self.credits = 0
        self._collecting = threading.Lock()  # the pool of an edge may ask what came back, in any thread

    def check(self, step: int) -> None:
        """Refuses a step that does not grow."""
        check_step(step)
        if not self._last < step < 2**64:
            raise ArgumentError(f"edge steps grow, up to 2**64 - 1: step {step} after {self._last}")

    def take(self, step: int, timeout: float) -> int:
        """The slot for step ``step``, once one is free; the same one until it is sent."""
        self.check(step)
        if self._taken is None:
            self.wait_until(self._free.__len__, timeout)
            written = self._written[self._free[0]]
            if written is not None:
                written.wait(timeout)  # raises what became of it
                self._written[self._free[0]] = None
            self._taken = self._free.popleft()
        return self._taken

    @property
    def taken(self) -> int:
        """The slot that was taken. Raises `ArgumentError`."""
        if self._taken is None:
            raise ArgumentError("no slot was taken for this step: call slot() or fill() before send()")
        return self._taken

    def send(self, step: int, nbytes: int, flight: Flight | None = None) -> Completion:
        """Makes the first ``nbytes`` of the slot that was taken arrive as ``step``."""
        slot, number = self.taken, self._sent + 1
        self._flights[slot] = flight or Flight(self, None)  # before the consumer can answer
        try:
            if self.mapped:
                completion = self.channel.signal(self._arrival, number)
            else:
                completion = self._written[slot] = self._write(self.ring.slot(slot), nbytes, number)
        except BaseException:
            self._flights[slot] = None
            raise
        self._taken, self._last, self._sent = None, step, number
        return completion

    def _write(self, at: int, nbytes: int, number: int) -> Completion:
        inbox, outbox = self._inbox, self._outbox
        source = outbox.region.view(outbox.offset + at, nbytes)
        target = inbox.region.view(inbox.offset + at, nbytes)
        return self.channel.write(source, target, (self._arrival, number))

    @property
    def in_flight(self) -> bool:
        """Whether any slot has yet to come back."""
        self.collect()
        return any(flight is not None for flight in self._flights)

    def wait_until(self, done: Callable[[], object], timeout: float) -> None:
        """Waits for slots to come back until ``done()``. Raises `PeerLost` or `WaitTimeout`."""
        self.collect()
        end = 0.0
        while not done():
            number = self.credits + 1
            if done():  # another thread took note of the credit that we would wait for
                return
            end = end or time.monotonic() + timeout
            try:
                self._outbox.region.wait(self._outbox.offset, number, max(0.0, end - time.monotonic()), self.channel)
            except WaitTimeout:
                raise WaitTimeout(
                    f"{self.channel.peer} gave nothing back within {timeout:g} s, of a ring of {self.ring.depth}: "
                    "is it slow, or does it keep what it received?"
                ) from None
            self.collect()

    def wait_for_credit(self, before: int, timeout: float) -> None:
        """Waits until more than ``before`` slots have ever come back."""
        self.wait_until(lambda: self.credits > before, timeout)

    def flush(self, timeout: float) -> None:
        """Returns when everything sent is in the consumer's memory, or raises what became of it."""
        for slot, completion in enumerate(self._written):
            if completion is not None:
                completion.wait(timeout)
                self._written[slot] = None

    def collect(self) -> None:
        """Takes note of the slots that came back. In any thread."""
        with self._collecting:
            credit = self._outbox.region.load(self._outbox.offset)
            while self.credits < credit:
                (slot,) = _RECORD.unpack_from(self._records, self.ring.record(self.credits + 1))
                flight = self._flights[slot] if slot < self.ring.depth else None
                if flight is None:
                    raise ProtocolError(f"the consumer gave back slot {slot}, which it does not have")
                self._flights[slot] = None
                self._free.append(slot)
                self.credits += 1
                flight.kept = flight.ring = None


class RingConsumer:
    """The receiving end. One thread at a time; ``give_back`` may be called in any thread, at any moment."""

    def __init__(self, channel: Channel, inbox: View, outbox: RemoteView, ring: Ring) -> None:
        _check_memory("inbox", inbox, ring.nbytes)
        _check_memory("outbox", outbox, ring.words_nbytes)
        self.ring = ring
        self.inbox, self._outbox = inbox, outbox
        self._credit = outbox.region.view(outbox.offset, 8)
        self.channel = lane_of(channel, self._credit)
        mapped = self.channel.map(self._credit)
        self.mapped = mapped is not None
        self.memory = inbox.buffer
        self._records = self.memory if mapped is None else memoryview(mapped)[outbox.offset :]
        self._pairs = [self._pair(number) for number in range(ring.depth)]
        self._written: list[Completion | None] = [None] * ring.depth
        self._next = collections.deque(range(ring.depth))  # in the order in which the producer takes them
        self._returned: collections.deque[int] = collections.deque()
        self._lock = threading.Lock()
        self._last = self._received = self._given = 0

    def _pair(self, number: int) -> tuple[View, RemoteView]:
        at, size = self.ring.record(number), _RECORD.size
        source = self.inbox.region.view(self.inbox.offset + at, size)
        return source, self._outbox.region.view(self._outbox.offset + at, size)

    def look(self, step: int, bound: int, timeout: float) -> tuple[int, Header]:
        """Waits for step ``step``; its slot and header. Changes nothing: ``accept`` does, when all is well.

        ``bound``: how many bytes of payload there may be.
        """
        if step <= self._last:
            raise ArgumentError(f"edge steps grow: step {step} after {self._last}")
        inbox = self.inbox
        try:
            inbox.region.wait(inbox.offset, self._received + 1, timeout, self.channel)
        except WaitTimeout:
            if self._next:
                raise
            raise WaitTimeout(
                f"nothing can come: all {self.ring.depth} slots of this ring are kept here. Let go of what was "
                "received earlier, or make the ring deeper"
            ) from None
        try:
            slot = self._next[0]
        except IndexError:
            raise ProtocolError("the producer sent a step for which it had no slot") from None
        header = unpack(self.memory, self.ring.slot(slot), bound)
        if header.step != step:
            raise ProtocolError(f"this is step {header.step}, not {step}: a consumer receives every step that is sent")
        return slot, header

    def ready(self) -> bool:
        """Whether the next step has arrived."""
        return self.inbox.region.load(self.inbox.offset) > self._received

    def accept(self, step: int) -> None:
        """The step that was looked at is received: its slot is ours until ``give_back``."""
        self._next.popleft()
        self._last, self._received = step, self._received + 1

    def give_back(self, slot: int) -> None:
        """The producer may have the slot again. To nobody, if it is gone."""
        # The garbage collector may call this in the middle of itself: none waits for the lock, its holder looks again.
        self._returned.append(slot)
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    self._give(self._returned.popleft())
            finally:
                self._lock.release()

    def _give(self, slot: int) -> None:
        if self.channel.lost:  # also in a forked child: the records are its parent's
            return
        number = self._given + 1
        self._next.append(slot)  # first: the producer may use it at once
        self._given = number
        try:
            self._give_credit(number, slot)
        except (PeerLost, RegionClosed):
            pass  # nobody is there to use it
        except WaitTimeout:  # the channel is full, and nothing was sent: the next one that comes back takes it along
            self._next.pop()
            self._given = number - 1
            self._returned.appendleft(slot)
            raise

    def _give_credit(self, number: int, slot: int) -> None:
        at = self.ring.record(number)
        if self.mapped:
            _RECORD.pack_into(self._records, at, slot)
            self.channel.signal(self._credit, number)
            return
        place = number % self.ring.depth
        earlier = self._written[place]
        if earlier is not None:
            earlier.wait()  # its record may still be on its way
        _RECORD.pack_into(self._records, at, slot)
        self._written[place] = self.channel.write(*self._pairs[place], (self._credit, number))
