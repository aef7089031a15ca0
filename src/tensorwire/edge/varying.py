"""The ends of an edge whose tensors vary: an edge group of one edge, whose tensors have headers.

*Bounded*: header and payload lie in the producer's outbox, one after the other. *Dynamic*: the payload lies in memory
of a pool, and the header says where. A consumer that maps that memory looks at it in place; to others the outbox is
written, and they read payload of any size into a pool of their own.
"""

from __future__ import annotations

import time
from typing import Any

from tensorwire._native import Hold
from tensorwire.edge.ends import ConsumerEnd, ProducerEnd
from tensorwire.edge.group import EdgeGroup
from tensorwire.edge.header import HEADER, MOST_BYTES, TENSOR, pack_tensor, unpack
from tensorwire.edge.pool import Lease, Pool
from tensorwire.edge.received import Received
from tensorwire.edge.static import DEFAULT_TIMEOUT
from tensorwire.edge.tensor import Spec, check_step, check_tensor, copy_tensor
from tensorwire.errors import ArgumentError, OutOfMemory, ProtocolError, RegionClosed, WaitTimeout
from tensorwire.observe import counters

_EDGE = 0  # its place in its group


class _VaryingProducer(ProducerEnd):
    """What both kinds have in common: the step that was begun, and the end."""

    def __init__(self, group: EdgeGroup) -> None:
        self._group = group
        self._last = self._prepared = 0
        self._begun = self._closed = False

    def _begin(self, step: int, timeout: float) -> memoryview:
        """The bank for ``step``, once the consumer has memory for it."""
        self._check(step)
        group, end = self._group, time.monotonic() + timeout
        if not self._begun:
            group.begin(timeout, holds=False)  # what the caller looks into does not keep it: only the consumer does
            self._begun = True
        self._prepared = step
        group.reserve(max(0.0, end - time.monotonic()))
        assert group.bank is not None
        return group.bank.memory

    def _check(self, step: int) -> None:
        if self._closed:
            raise RegionClosed("this edge was closed: connect another one")
        check_step(step)
        if not self._last < step < 2**64:
            raise ArgumentError(f"edge steps grow, up to 2**64 - 1: step {step} after {self._last}")

    def _sent(self, step: int) -> None:
        self._last, self._begun = step, False

    def flush(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._group.flush(timeout)

    @property
    def closed(self) -> bool:
        return self._closed

    def _settle(self, timeout: float) -> None:
        self._group.flush(timeout)
        self._group.drain(timeout)

    def abandon(self) -> None:
        self._closed = True
        self._group.close()


class BoundedProducer(_VaryingProducer):
    """The sending end for tensors of up to ``bound`` bytes."""

    def __init__(self, group: EdgeGroup, bound: int) -> None:
        super().__init__(group)
        self.bound = bound
        self._filled: Spec | None = None

    def slot(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> memoryview:
        """Waits until the consumer has released an earlier tensor's memory.

        Args:
            step: The step, which has to grow.
            timeout: Seconds to wait.

        Returns:
            The ``bound`` bytes in which the tensor of this step is to be born.

        Raises:
            ArgumentError: The step does not grow.
            PeerLost, WaitTimeout: The consumer is gone, or released nothing in time; you may try again.
        """
        self._filled = None
        return self._begin(step, timeout)[HEADER : HEADER + self.bound]

    def fill(self, step: int, tensor: Any, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._check(step)
        check_tensor(tensor, None)
        spec = self._fitting(Spec.of(tensor))
        copy_tensor(self.slot(step, timeout)[: spec.nbytes], tensor)
        counters.add(copies=1, copied_bytes=spec.nbytes)
        self._filled = spec

    def send(self, step: int, spec: Spec | None = None) -> None:
        """Sends the tensor that lies in the slot of a step.

        Args:
            step: The step.
            spec: What lies there; None: what was filled.

        Raises:
            ArgumentError: The step has no slot, or the tensor does not fit.
        """
        self._check(step)
        spec = self._filled if spec is None else self._fitting(spec)
        if spec is None or not self._begun or self._prepared != step:
            raise ArgumentError(f"nothing was written for step {step}: call fill(), or slot() and send(step, spec)")
        group = self._group
        assert group.bank is not None
        pack_tensor(group.bank.memory, 0, step, spec)
        group.send(_EDGE, HEADER + spec.nbytes)
        self._sent(step)
        self._filled = None

    def _fitting(self, spec: Spec) -> Spec:
        if spec.nbytes > self.bound:
            raise ArgumentError(f"this edge carries up to {self.bound} bytes, and {spec} has {spec.nbytes}")
        return spec


class DynamicProducer(_VaryingProducer):
    """The sending end for tensors of any size, whose payload lies in ``pool``."""

    def __init__(self, group: EdgeGroup, pool: Pool) -> None:
        super().__init__(group)
        self._pool = pool
        self._filled: tuple[int, Lease, Spec] | None = None

    def room(self, nbytes: int, timeout: float = DEFAULT_TIMEOUT) -> Lease:
        """Leases memory of the pool for a tensor to be born in, and waits while the pool has none.

        Args:
            nbytes: Its size in bytes.
            timeout: Seconds to wait for the consumer to give memory back.

        Returns:
            The lease.

        Raises:
            OutOfMemory: The pool has none, and nothing of this edge will come back.
            PeerLost, WaitTimeout: The consumer is gone, or gave nothing back in time.
        """
        end = time.monotonic() + timeout
        while True:
            try:
                return self._group.room(_EDGE, nbytes)
            except OutOfMemory:
                if not self._group.wait_for_reader(max(0.0, end - time.monotonic())):
                    raise

    def fill(self, step: int, tensor: Any, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._check(step)
        check_tensor(tensor, None)
        spec = Spec.of(tensor)
        lease = self.room(spec.nbytes, timeout)
        copy_tensor(lease.memory, tensor)
        counters.add(copies=1, copied_bytes=spec.nbytes)
        self._filled = step, lease, spec

    def send(
        self, step: int, lease: Lease | None = None, spec: Spec | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        """Sends the tensor that lies in a lease; from then on its memory must stay as it is.

        Args:
            step: The step, which has to grow.
            lease: Where it lies; None: what ``fill`` took for this step. You may release it: the memory goes back when
                nobody reads it.
            spec: What lies there.
            timeout: Seconds to wait for the consumer.

        Raises:
            ArgumentError: The tensor does not lie in the lease, or the step was not filled.
            PeerLost, WaitTimeout: Nothing was sent; after a timeout you may try again.
        """
        self._check(step)
        if lease is None:
            if self._filled is None or self._filled[0] != step:
                raise ArgumentError(f"nothing was written for step {step}: call fill({step}, tensor), or pass a lease")
            _, lease, spec = self._filled
        if not isinstance(lease, Lease):
            raise ArgumentError(f"send takes a lease of room(), not {type(lease).__name__}")
        if spec is None or spec.nbytes > lease.nbytes:
            raise ArgumentError(f"this lease of {lease.nbytes} bytes has no {spec or 'tensor'}")
        if lease.slab.device is not self._pool.device:
            raise ArgumentError("this lease belongs to another device's pool: take it from room()")
        lease.hold  # noqa: B018  # raises where it was released
        self._begin(step, timeout)
        self._group.send_dynamic(_EDGE, lease, spec, step)
        self._sent(step)
        self._filled = None


class VaryingConsumer(ConsumerEnd):
    """The receiving end; ``bound``: the most bytes of a bounded edge, None for a dynamic one."""

    def __init__(self, group: EdgeGroup, bound: int | None) -> None:
        self._group, self._bound = group, bound
        self._last = 0
        self._begun = False
        self._held: Hold | None = None  # what arrived, and was not returned yet

    def receive(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> Received:
        if step <= self._last:
            raise ArgumentError(f"edge steps grow: step {step} after {self._last}")
        end = time.monotonic() + timeout
        held = self._held = self._held or self._take(timeout)
        header = unpack(memoryview(held), 0, MOST_BYTES if self._bound is None else self._bound)
        if header.step != step:
            raise ProtocolError(f"this is step {header.step}, not {step}: a consumer receives every step that is sent")
        if header.kind != TENSOR or header.spec is None:
            raise ProtocolError("malformed header: an edge of its own carries tensors")
        if self._bound is None:
            hold = self._group.payload(_EDGE, header, held, max(0.0, end - time.monotonic()))
        else:
            hold = self._group.part(_EDGE, HEADER, header.nbytes, held)
        self._last, self._held, self._begun = step, None, False
        return Received(hold, header.spec)

    def _take(self, timeout: float) -> Hold:
        group = self._group
        if not self._begun:
            group.begin()
            self._begun = True
        try:
            held = group.receive(_EDGE, timeout)
        except WaitTimeout:
            if not group.all_held:
                raise
            raise WaitTimeout(
                "nothing can arrive: all memory of this edge is still held here. Release what was received earlier, or "
                "connect the edge with a larger depth"
            ) from None
        group.end()  # what was received is all that keeps the bank
        return held

    def ready(self) -> bool:
        return self._held is not None or self._group.ready(_EDGE, self._group.step + (not self._begun))

    def close(self) -> None:
        self._group.close()
