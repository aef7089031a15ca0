"""The dynamic edge: only when it is sent is it known how large a tensor is, and even its rank may vary.

The producer writes a header that says where the payload lies, in memory of its pool. Where the channel maps it, the
consumer looks at it there; elsewhere it reads it into memory of its own pool. It gives the slot back when nobody looks
into the payload any more, or when it was read; then the producer's memory is free again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tensorwire._native import Hold, Memory
from tensorwire.device import Channel, Completion, RemoteView, View
from tensorwire.device.region import Access
from tensorwire.edge.header import MOST_BYTES, TENSOR, Header, Value, pack_error, pack_tensor, pack_value
from tensorwire.edge.pool import Lease, Pool
from tensorwire.edge.received import Received, value_of
from tensorwire.edge.ring import Flight, Ring, RingConsumer, RingProducer
from tensorwire.edge.static import DEFAULT_TIMEOUT
from tensorwire.edge.tensor import Spec, check_tensor, copy_tensor
from tensorwire.errors import ArgumentError, OutOfMemory, ProtocolError
from tensorwire.observe import counters


class DynamicProducer:
    """The sending end. Payload is born in ``pool``, by ``room``, or copied there, by ``fill``; headers go to ``inbox``.

    ``fill(step, tensor)`` and ``send(step)`` are those of every kind of edge. What is born there is sent by
    ``send(step, lease, spec)``.

    ``inbox``, ``outbox``, ``ring``: as for `BoundedProducer`; the ring's bound may be 0. ``access``: what a consumer
    that looks at the payload in place may do to it; "write" is for consumers that compute in place, and then changes
    what the producer has. The pool keeps what is in flight, also for a producer that was dropped. One thread at a time.
    """

    def __init__(
        self, channel: Channel, inbox: RemoteView, outbox: View, *, ring: Ring, pool: Pool, access: Access = "read"
    ) -> None:
        _check_pool(pool, channel)
        self._ring = RingProducer(channel, inbox, outbox, ring)
        self._pool, self._access = pool, access
        self._filled: tuple[int, Lease] | None = None
        pool.keep(self._ring)

    def room(self, nbytes: int, timeout: float = DEFAULT_TIMEOUT) -> Lease:
        """Memory for a payload to be born in; where the pool has none, once the consumer has given some back.

        Raises `OutOfMemory` if nothing of this edge is on its way, `PeerLost` or `WaitTimeout`.
        """
        ring = self._ring
        ring.collect()
        end = time.monotonic() + timeout
        while True:
            before = ring.credits
            try:
                return self._pool.lease(nbytes)
            except OutOfMemory:
                if not ring.in_flight and ring.credits == before:
                    raise
            ring.wait_for_credit(before, max(0.0, end - time.monotonic()))

    def fill(self, step: int, tensor: Any, timeout: float = DEFAULT_TIMEOUT) -> Lease:
        """Copies ``tensor`` into memory of the pool for step ``step``: for what was not born there. ``send`` sends it.

        Any array on the CPU, as for `Producer.fill`; it may be overwritten as soon as this returns.

        Args:
            step: The step to send it in, which has to grow.
            tensor: Any array on the CPU with the buffer protocol or DLPack, strided or not.
            timeout: Seconds to wait for memory where the pool has none.

        Returns:
            The copy, for those who send it over other edges of the device, too.

        Raises:
            ArgumentError: For a step that does not grow, and for what is no such array.
            OutOfMemory, PeerLost, WaitTimeout: As ``room``.
        """
        self._ring.check(step)
        check_tensor(tensor, None)
        spec = Spec.of(tensor)
        lease = self.room(spec.nbytes, timeout)
        copy_tensor(lease.memory, tensor)
        counters.add(copies=1, copied_bytes=spec.nbytes)
        lease.spec = spec
        self._filled = step, lease
        return lease

    def send(
        self,
        step: int,
        lease: Lease | None = None,
        spec: Spec | None = None,
        *,
        offset: int = 0,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Completion:
        """Makes the tensor arrive that lies at ``offset`` in ``lease``, once there is a slot for its header.

        ``lease``: by default what ``fill`` made for this step. ``spec``: what lies there; by default what ``fill``
        took. The memory must stay as it is for as long as the lease is ``busy``; whoever only lets go of it need not
        wait. One lease may be sent over several edges of its device. Raises `ArgumentError` for what lies outside of
        the lease and for a step that was not filled, `PeerLost`, or `WaitTimeout`: then nothing was sent, and one may
        try again.
        """
        if lease is None:
            lease = self._take_filled(step)
        elif not isinstance(lease, Lease):
            raise ArgumentError(f"send takes a lease of room() or fill(), not {type(lease).__name__}")
        spec = lease.spec if spec is None else spec
        if spec is None or not 0 <= offset <= lease.nbytes - spec.nbytes:
            raise ArgumentError(f"this lease of {lease.nbytes} bytes has no {spec or 'tensor'} at {offset}")
        if lease.slab.device is not self._pool.device:
            raise ArgumentError("this lease is of another device's pool: take it from room() or fill()")
        ring, hold, region = self._ring, lease.hold, lease.slab.shown(self._access)
        at = ring.ring.slot(ring.take(step, timeout))
        used = pack_tensor(ring.memory, at, step, spec, region=region, offset=lease.offset + offset)
        flight = Flight(ring, hold)
        completion = ring.send(step, used, flight)
        lease.lend(flight)
        self._filled = None
        return completion

    def _take_filled(self, step: int) -> Lease:
        if self._filled is None or self._filled[0] != step:
            raise ArgumentError(f"nothing lies there for step {step}: call fill({step}, tensor), or pass a lease")
        return self._filled[1]

    def send_value(self, step: int, value: Value, timeout: float = DEFAULT_TIMEOUT) -> Completion:
        """Sends an int, float, bool, None, short string, or `NO_VALUE` instead of a tensor."""
        ring = self._ring
        at = ring.ring.slot(ring.take(step, timeout))
        return ring.send(step, pack_value(ring.memory, at, step, value))

    def send_error(self, step: int, error: BaseException | str, timeout: float = DEFAULT_TIMEOUT) -> Completion:
        """Raises `ProducerFailed` with this error's message at the consumer, which else would wait for ever."""
        ring = self._ring
        at = ring.ring.slot(ring.take(step, timeout))
        return ring.send(step, pack_error(ring.memory, at, step, error))

    def flush(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Returns when every header is in the consumer's memory, or raises what became of it."""
        self._ring.flush(timeout)

    def drain(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Returns when the consumer has let go of everything that was sent. Raises `PeerLost` or `WaitTimeout`."""
        self._ring.wait_until(lambda: not self._ring.in_flight, timeout)


@dataclass(slots=True)
class _Reading:
    """A read on its way, and what keeps the memory that it fills."""

    hold: Hold
    completion: Completion
    kept: bool = False


class DynamicConsumer:
    """The receiving end. ``inbox``, ``outbox``, ``ring``: as for `BoundedConsumer`.

    ``pool``: where payload is read to; not needed where the channel maps the producer's memory. It receives every step
    that is sent, one thread at a time; what it received may be released in any thread. Raises `ArgumentError` without
    the pool that it needs.
    """

    def __init__(
        self, channel: Channel, inbox: View, outbox: RemoteView, *, ring: Ring, pool: Pool | None = None
    ) -> None:
        self._ring = RingConsumer(channel, inbox, outbox, ring)
        if not self._ring.mapped:
            if pool is None:
                raise ArgumentError("this device maps no memory of peers: the consumer needs a pool to read into")
            _check_pool(pool, channel)
        self._pool = pool
        self._mapped: dict[int, Memory] = {}
        self._reading: _Reading | None = None

    def receive(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> Received | Value:
        """Step ``step``: a tensor, in the producer's memory where that is mapped, else read into ours; or a value.

        Raises as `BoundedConsumer.receive` does, and `OutOfMemory` if the pool has no room: then nothing changed, and
        one may try again after letting go of other tensors.
        """
        ring = self._ring
        end = time.monotonic() + timeout
        slot, header = ring.look(step, MOST_BYTES, timeout)
        if header.kind != TENSOR:
            ring.accept(step)
            ring.give_back(slot)
            return value_of(header)
        if header.spec is None or header.region is None or header.region.device != ring.channel.device.name:
            raise ProtocolError("this producer sends like that of a bounded edge: the same kind at both ends")
        if ring.mapped:
            hold = self._find(header, slot)
            ring.accept(step)
            counters.mapped(header.nbytes)
            return Received(hold, header.spec)
        hold = self._read(header, end)
        ring.accept(step)
        ring.give_back(slot)
        return Received(hold, header.spec)

    def ready(self) -> bool:
        """Whether the next step has arrived."""
        return self._ring.ready()

    def _find(self, header: Header, slot: int) -> Hold:
        """The payload where it lies."""
        region = header.region
        assert region is not None
        memory = self._mapped.get(region.key)
        if memory is None or memory.closed:
            self._mapped = {key: memory for key, memory in self._mapped.items() if not memory.closed}
            memory = self._ring.channel.map(region.view())
            assert memory is not None
            self._mapped[region.key] = memory
        if header.offset + header.nbytes > memory.nbytes:
            raise ProtocolError(f"malformed header: {header.nbytes} bytes at {header.offset} of {memory.nbytes}")
        return Hold(memory, header.offset, header.nbytes, self._ring.give_back, slot)

    def _read(self, header: Header, end: float) -> Hold:
        """The payload in memory of our pool. The slot is given back afterwards: no credit overtakes the read."""
        pool, region = self._pool, header.region
        assert pool is not None
        assert region is not None
        if self._reading is None:
            lease = pool.lease(header.nbytes)
            if not header.nbytes:
                return lease.hold
            target = lease.slab.region.view(lease.offset, header.nbytes)
            source = region.view(header.offset, header.nbytes)
            self._reading = _Reading(lease.hold, self._ring.channel.read(target, source))
        reading = self._reading
        try:
            reading.completion.wait(max(0.0, end - time.monotonic()))
        finally:
            if reading.completion.done:
                self._reading = None
            elif not reading.kept:  # a later receive() waits on; if none comes, nobody else gets this memory before
                reading.kept = True
                reading.completion.on_done(lambda _: reading)
        return reading.hold


def _check_pool(pool: Pool, channel: Channel) -> None:
    if pool.device is not channel.device:
        raise ArgumentError(f"the pool of an edge is of its channel's device, not of another {pool.device.name}")
