"""The static edge: a tensor whose size the plan knows. One write and one signal per step; if mapped, a signal alone.

Slots form rings. Step ``n`` (from 1, strictly growing) uses slot ``n % depth``. The consumer's *arrival* word names the
step in its slot; the producer's *credit* word names the last step that the consumer has released. A producer may fill
the slot of step ``n`` once the credit is ``n - depth``. Either side may come first: words wait, and no message asks.

An edge keeps to one lane of its channel: its payload, then its signal. Edges have no common order; if one must not
overtake another, it waits for a word first.

A credit need not be a message of its own. If another edge's signal implies it (a store's new version implies that the
gradient was read), both edges share one word.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorwire.device import Channel, Completion, Region, RemoteView, View
from tensorwire.device.contract import DONE
from tensorwire.edge.tensor import Spec, check_step, check_tensor, copy_tensor
from tensorwire.edge.traced_write import write_traced
from tensorwire.errors import ArgumentError
from tensorwire.observe import counters

DEFAULT_TIMEOUT = 1800.0


@dataclass(frozen=True, slots=True)
class Word:
    """A signal word in our own memory, that a peer raises.

    Args:
        region: The memory.
        offset: Where the word begins in it: 8 bytes at a multiple of 8.
        channel: To the peer that raises it.
    """

    region: Region
    offset: int
    channel: Channel

    def wait(self, at_least: int, timeout: float) -> None:
        """Waits until the word is ``at_least`` so large.

        Args:
            at_least: The number.
            timeout: Seconds to wait.

        Raises:
            PeerLost: The peer is gone.
            WaitTimeout: ``timeout`` seconds have passed; you may wait again.
        """
        self.region.wait(self.offset, at_least, timeout, self.channel)

    @property
    def value(self) -> int:
        """The present value."""
        return self.region.load(self.offset)


def lane_of(channel: Channel, word: RemoteView) -> Channel:
    """The lane for what raises ``word``: always the same one, and spread evenly over many words."""
    lanes = channel.lanes
    if len(lanes) == 1:
        return channel
    return lanes[zlib.crc32(struct.pack("<QQ", word.region.key, word.offset)) % len(lanes)]


class Producer:
    """The sending end of one edge to one consumer.

    If the channel maps the consumer's memory, ``slot()`` returns the consumer's slot itself, and ``send`` only signals.
    Otherwise it returns a part of ``source``, which ``send`` writes across.

    Args:
        channel: To the consumer.
        arrival: The consumer's word for the last step sent.
        slots: The consumer's memory, one view per slot. Without slots the consumer reads the producer's memory in
            place, and ``send`` only signals.
        source: This device's registered memory, one view per slot, each of the slot's size, unless it is mapped.
        credit: This process's word by which the consumer releases slots; None: another word says that a slot is free.
        spec: The tensor that the slots are for; then ``fill`` takes no other.
        label: The name of its transfers in traces.

    Raises:
        ArgumentError: The slots are not of the size of ``spec``, or ``source`` is missing.
    """

    def __init__(
        self,
        channel: Channel,
        arrival: RemoteView,
        *,
        slots: Sequence[RemoteView] = (),
        source: Sequence[View] = (),
        credit: Word | None = None,
        spec: Spec | None = None,
        label: str = "",
    ) -> None:
        self._label = label
        self._channel = lane_of(channel, arrival)
        self._arrival = arrival
        self._slots = list(slots)
        self._source = list(source)
        self._credit = credit
        self.depth = max(1, len(self._slots))
        self.nbytes = self._slots[0].nbytes if self._slots else 0
        self._sent: list[Completion | None] = [None] * self.depth
        self._memory = self._find_memory()
        self._last = 0
        self.spec = spec
        check_spec(spec, self._memory)

    def _find_memory(self) -> list[memoryview]:
        if not self._slots:
            return []
        mapped = self._channel.map(self._slots[0]) if not self._source else None
        if mapped is not None:
            whole = memoryview(mapped)
            return [whole[s.offset : s.offset + s.nbytes] for s in self._slots]
        if len(self._source) != self.depth or any(v.nbytes != self.nbytes for v in self._source):
            raise ArgumentError("an edge that is not mapped needs one source view per slot, each of the slot's size")
        return [v.buffer for v in self._source]

    @property
    def memory(self) -> memoryview:
        """The one slot of an edge of depth 1, whoever owns it now."""
        return self._memory[0]

    @property
    def mapped(self) -> bool:
        """Whether sending moves no byte."""
        return not self._source

    def slot(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> memoryview:
        """Waits until the consumer has given the slot back.

        Args:
            step: The step; steps grow.
            timeout: Seconds to wait.

        Returns:
            The memory in which the tensor of this step is to be born.

        Raises:
            ArgumentError: The step does not grow.
            PeerLost, WaitTimeout: The consumer is gone, or has not released the slot.
        """
        if step <= self._last:
            self._check(step)
        credit, at = self._credit, step % self.depth
        if credit is not None and step > self.depth:
            credit.region.wait(credit.offset, step - self.depth, timeout, credit.channel)
        earlier = self._sent[at]
        if earlier is not None:
            earlier.wait(timeout)  # its bytes may still be on their way
            self._sent[at] = None
        return self._memory[at]

    def fill(self, step: int, tensor: Any, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Copies ``tensor`` into the slot of step ``step``. ``send`` sends it.

        Args:
            step: The step; steps grow.
            tensor: Any array on the CPU with the buffer protocol or DLPack, strided or not; its elements go in the
                order of their indices.
            timeout: Seconds to wait for the slot.

        Raises:
            ArgumentError: It has another size than the slot, or another shape or dtype than the edge's ``spec``.
            PeerLost, WaitTimeout: The consumer is gone, or has not released the slot.
        """
        if not self._memory:
            raise ArgumentError("this edge carries no payload: it has no slots to fill")
        check_step(step)
        check_tensor(tensor, self.spec)
        copy_tensor(self.slot(step, timeout), tensor)
        counters.add(copies=1, copied_bytes=self.nbytes)

    def send(self, step: int, *, nbytes: int | None = None) -> Completion:
        """Sends the contents of a step's slot.

        Args:
            step: The step; steps grow.
            nbytes: How many bytes of the slot to send, from its beginning; None: all.

        Returns:
            The completion of the write, or of the signal if no byte moves.

        Raises:
            ArgumentError: The step does not grow.
        """
        if step <= self._last:
            self._check(step)
        self._last = step
        if not self._source:
            counters.mapped(self.nbytes if nbytes is None else nbytes)
            signalled = self._channel.signal(self._arrival, step)
            if signalled is not DONE:  # it failed: flush() and slot() say so
                self._sent[step % self.depth] = signalled
            return signalled
        at = step % self.depth
        source, slot = self._source[at], self._slots[at]
        if nbytes is not None:
            source = source.region.view(source.offset, nbytes)
            slot = slot.region.view(slot.offset, nbytes)
        self._sent[at] = written = write_traced(self._channel, source, slot, (self._arrival, step), step, self._label)
        return written

    def put(self, source: View, target: RemoteView) -> Completion:
        """Writes to the consumer's memory ahead of the next send, whose arrival announces both.

        Args:
            source: Memory of this device.
            target: Memory of the consumer, of the same size.

        Returns:
            The completion of the write.
        """
        return self._channel.write(source, target)

    def flush(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Returns when everything sent is in the consumer's memory.

        Args:
            timeout: Seconds to wait.

        Raises:
            PeerLost, WaitTimeout: An earlier send failed, or is not over yet.
        """
        for at, completion in enumerate(self._sent):
            if completion is not None:
                completion.wait(timeout)
                self._sent[at] = None

    @property
    def failure(self) -> BaseException | None:
        """The error of a failed send; None: none has failed so far."""
        for completion in self._sent:
            if completion is not None and completion.done:
                try:
                    completion.wait(0.0)
                except BaseException as error:
                    return error
        return None

    def _check(self, step: int) -> None:
        if step <= self._last:
            raise ArgumentError(f"edge steps grow: step {step} after {self._last}")


class Consumer:
    """The receiving end of one edge.

    Args:
        arrival: This process's word for the last step sent.
        slots: Views of this process's memory that the producer fills, or of mapped memory of the producer.
        credit: A channel to the producer, and its word by which the consumer releases slots.
        spec: The tensor that the slots are for.

    Raises:
        ArgumentError: The slots are not of the size of ``spec``.
    """

    def __init__(
        self,
        arrival: Word,
        *,
        slots: Sequence[memoryview] = (),
        credit: tuple[Channel, RemoteView] | None = None,
        spec: Spec | None = None,
    ) -> None:
        self._arrival = arrival
        self._slots = list(slots)
        self._credit = None if credit is None else (lane_of(*credit), credit[1])
        self.spec = spec
        check_spec(spec, self._slots)

    def credit_to(self, channel: Channel, word: RemoteView) -> None:
        """Sets where slots are given back, for a consumer that learns of it after its construction.

        Args:
            channel: To the producer.
            word: The producer's word.
        """
        self._credit = (lane_of(channel, word), word)

    def receive(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> memoryview | None:
        """Waits for a step.

        Args:
            step: The step.
            timeout: Seconds to wait for it.

        Returns:
            Its slot, valid until ``release(step)``; None for an edge without slots.

        Raises:
            PeerLost, WaitTimeout: The producer is gone, or sent nothing in time; you may wait again.
        """
        arrival = self._arrival
        arrival.region.wait(arrival.offset, step, timeout, arrival.channel)
        return self._slots[step % len(self._slots)] if self._slots else None

    def ready(self, step: int) -> bool:
        """Looks for a step.

        Args:
            step: The step.

        Returns:
            Whether ``receive(step)`` would return at once.
        """
        return self._arrival.value >= step

    def release(self, step: int) -> None:
        """Gives a slot back to the producer.

        Args:
            step: The step whose slot, with those of all earlier steps, is free.
        """
        if self._credit is not None:
            channel, word = self._credit
            channel.signal(word, step)


def check_spec(spec: Spec | None, slots: Sequence[memoryview]) -> None:
    """Refuses slots that are not of the size of ``spec``."""
    if spec is None:
        return
    for slot in slots:
        if slot.nbytes != spec.nbytes:
            raise ArgumentError(f"a slot for {spec} has {spec.nbytes} bytes, not {slot.nbytes}")
