"""The bounded edge: a tensor whose shape varies under a known size. Header and payload go in one write.

A slot is a header with room for ``bound`` bytes behind it. Only the bytes that are used are sent. Slots go back in any
order, so that a tensor may be kept for long as long as there are other slots.
"""

from __future__ import annotations

from typing import Any

from tensorwire._native import Hold
from tensorwire.device import Channel, Completion, RemoteView, View
from tensorwire.edge.header import HEADER, TENSOR, Value, pack_error, pack_tensor, pack_value
from tensorwire.edge.received import Received, value_of
from tensorwire.edge.ring import Ring, RingConsumer, RingProducer
from tensorwire.edge.static import DEFAULT_TIMEOUT
from tensorwire.edge.tensor import Spec, check_tensor, copy_tensor
from tensorwire.errors import ArgumentError, ProtocolError
from tensorwire.observe import counters


class BoundedProducer:
    """The sending end. ``inbox``: the consumer's memory, ``ring.nbytes`` of it; ``outbox``: as much of our own.

    Where the channel maps the inbox, ``slot()`` hands out the consumer's own memory, what is born there is sent by a
    signal alone, and an outbox of ``ring.words_nbytes`` is enough. One thread at a time. Raises `ArgumentError` for
    memory of another size.
    """

    def __init__(self, channel: Channel, inbox: RemoteView, outbox: View, *, ring: Ring) -> None:
        self._ring = RingProducer(channel, inbox, outbox, ring)
        self._filled: Spec | None = None
        self.bound = ring.bound
        self.mapped = self._ring.mapped

    def slot(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> memoryview:
        """The ``bound`` bytes that the payload of step ``step`` is to be born in, once the consumer has left them.

        Raises `ArgumentError` for a step that does not grow, `PeerLost`, or `WaitTimeout`: then one may wait again.
        """
        self._filled = None
        at = self._at(step, timeout) + HEADER
        return self._ring.memory[at : at + self.bound]

    def fill(self, step: int, tensor: Any, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Copies ``tensor`` into the slot of step ``step``: for what was not born there. ``send`` sends it.

        Any array on the CPU, as for `Producer.fill`. Raises `ArgumentError` for what is larger than ``bound``, too.
        """
        self._ring.check(step)
        check_tensor(tensor, None)
        spec = self._fitting(Spec.of(tensor))
        copy_tensor(self.slot(step, timeout)[: spec.nbytes], tensor)
        counters.add(copies=1, copied_bytes=spec.nbytes)
        self._filled = spec

    def send(self, step: int, spec: Spec | None = None) -> Completion:
        """Makes the tensor arrive that lies in the slot of step ``step``; ``spec`` is what ``fill`` took, by default.

        Raises `ArgumentError` for a step without a slot, and for a tensor that does not fit.
        """
        spec = self._filled if spec is None else self._fitting(spec)
        if spec is None:
            raise ArgumentError("send needs the spec of what lies in the slot, or a fill() before")
        ring = self._ring
        nbytes = spec.nbytes
        used = pack_tensor(ring.memory, ring.ring.slot(ring.taken), step, spec) + nbytes
        if self.mapped:
            counters.mapped(nbytes)
        completion = ring.send(step, used)
        self._filled = None
        return completion

    def send_value(self, step: int, value: Value, timeout: float = DEFAULT_TIMEOUT) -> Completion:
        """Sends an int, float, bool, None, short string, or `NO_VALUE` instead of a tensor."""
        return self._ring.send(step, pack_value(self._ring.memory, self._at(step, timeout), step, value))

    def send_error(self, step: int, error: BaseException | str, timeout: float = DEFAULT_TIMEOUT) -> Completion:
        """Raises `ProducerFailed` with this error's message at the consumer, which else would wait for ever."""
        return self._ring.send(step, pack_error(self._ring.memory, self._at(step, timeout), step, error))

    def flush(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Returns when everything sent is in the consumer's memory, or raises what became of it."""
        self._ring.flush(timeout)

    def _at(self, step: int, timeout: float) -> int:
        return self._ring.ring.slot(self._ring.take(step, timeout))

    def _fitting(self, spec: Spec) -> Spec:
        if spec.nbytes > self.bound:
            raise ArgumentError(f"this edge carries up to {self.bound} bytes, and {spec} has {spec.nbytes}")
        return spec


class BoundedConsumer:
    """The receiving end. ``inbox``: our memory, ``ring.nbytes`` of it; ``outbox``: the producer's.

    It receives every step that is sent, one thread at a time; what it received may be released in any thread.
    """

    def __init__(self, channel: Channel, inbox: View, outbox: RemoteView, *, ring: Ring) -> None:
        self._ring = RingConsumer(channel, inbox, outbox, ring)

    def receive(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> Received | Value:
        """Step ``step``: a tensor in its slot, which the producer gets back when it is released, or a value.

        Raises `ProducerFailed` with the error that was sent instead, `PeerLost`, `WaitTimeout`, after which one may
        wait again, `ProtocolError` for what no producer sends, and `ArgumentError` for a step that does not grow.
        """
        ring = self._ring
        slot, header = ring.look(step, ring.ring.bound, timeout)
        if header.kind != TENSOR:
            ring.accept(step)
            ring.give_back(slot)
            return value_of(header)
        if header.region is not None or header.spec is None:
            raise ProtocolError("this producer sends like that of a dynamic edge: the same kind at both ends")
        ring.accept(step)
        inbox = ring.inbox
        at = inbox.offset + ring.ring.slot(slot) + HEADER
        return Received(Hold(inbox.region, at, header.nbytes, ring.give_back, slot), header.spec)

    def ready(self) -> bool:
        """Whether the next step has arrived."""
        return self._ring.ready()
