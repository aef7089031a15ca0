"""The ends of a connected edge: one set of verbs for every kind, and the memory that belongs to each."""

from __future__ import annotations

import collections
import threading
from typing import Any, Protocol, Union

from tensorwire._native import Hold
from tensorwire.device import Completion, Region
from tensorwire.edge.bounded import BoundedProducer
from tensorwire.edge.dynamic import DynamicProducer
from tensorwire.edge.header import Value
from tensorwire.edge.received import Received
from tensorwire.edge.static import DEFAULT_TIMEOUT, Consumer, Producer
from tensorwire.errors import ArgumentError, PeerLost, RegionClosed

AnyProducer = Union[Producer, BoundedProducer, DynamicProducer]  # noqa: UP007  # as a value, for Python 3.10


class Receiving(Protocol):
    """What a `ConsumerEnd` receives from."""

    def receive(self, step: int, timeout: float = ...) -> Received | Value:
        """Step ``step``."""

    def ready(self) -> bool:
        """Whether the next step has arrived."""


class ProducerEnd:
    """The sending end of a connected edge; made by ``connect_edge``. One thread at a time.

    ``producer`` is the `Producer`, `BoundedProducer` or `DynamicProducer` of this end, for tensors that are to be born
    in registered memory: by ``slot(step)``, on dynamic edges by ``room(nbytes)``.
    """

    def __init__(self, producer: AnyProducer, memory: Region) -> None:
        self.producer = producer
        self._memory = memory

    def fill(self, step: int, tensor: Any, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Copies ``tensor`` for step ``step``; ``send`` sends it. As `Producer.fill`, on every kind of edge."""
        self.producer.fill(step, tensor, timeout)

    def send(self, step: int) -> Completion:
        """Makes what ``fill`` took for step ``step`` arrive."""
        return self.producer.send(step)

    def flush(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Returns when everything sent is in the consumer's memory, or raises what became of it."""
        self.producer.flush(timeout)

    def close(self, timeout: float = 60.0) -> None:
        """Flushes, and gives the memory back. Idempotent.

        A dynamic edge's payload lies in this process's memory, so the end waits until the consumer has let go of it.

        Args:
            timeout: Seconds to wait.

        Raises:
            WaitTimeout: If that took longer; the memory is given back all the same.
        """
        if self._memory.closed:
            return
        try:
            self.producer.flush(timeout)
            if isinstance(self.producer, DynamicProducer):
                self.producer.drain(timeout)
        except PeerLost:
            pass  # nobody is there to see it
        finally:
            self._memory.close()

    def __enter__(self) -> ProducerEnd:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._memory.close()


class ConsumerEnd:
    """The receiving end of a connected edge; made by ``connect_edge``. It receives every step that is sent.

    One thread at a time; what was received may be released in any thread.
    """

    def __init__(self, consumer: Receiving, memory: Region) -> None:
        self._consumer = consumer
        self._memory = memory

    def receive(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> Received:
        """The tensor of step ``step``, whose memory goes back to the producer when nothing looks into it any more.

        Args:
            step: The step, which has to grow.
            timeout: Seconds to wait for it.

        Raises:
            ArgumentError: If the step does not grow, or brought a value instead of a tensor (``receive_value``).
            ContentMismatch: If the edge checks content, and this is not what was sent.
            PeerLost, WaitTimeout: If the producer is gone, or sent nothing in time.
            ProducerFailed: With the error that was sent instead.
        """
        received = self.receive_value(step, timeout)
        if not isinstance(received, Received):
            raise ArgumentError(f"step {step} brought the value {received!r}, not a tensor: use receive_value")
        return received

    def receive_value(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> Received | Value:
        """What step ``step`` brought, a tensor or a value (bounded and dynamic edges). Else as ``receive``."""
        return self._consumer.receive(step, timeout)

    def ready(self) -> bool:
        """Whether the next step has arrived."""
        return self._consumer.ready()

    def close(self) -> None:
        """Gives the memory back; tensors that are still kept stay as they are. Idempotent."""
        self._memory.close()

    def __enter__(self) -> ConsumerEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InOrder:
    """A static edge's consumer whose slots may be released in any order, in any thread.

    The credit word says up to which step all slots came back: a slot that is kept holds back those behind it.
    """

    def __init__(self, consumer: Consumer, memory: Region, offsets: list[int]) -> None:
        assert consumer.spec is not None
        self._consumer, self._memory, self._offsets, self._spec = consumer, memory, offsets, consumer.spec
        self._kept: collections.deque[int] = collections.deque()  # steps, in the order in which they came
        self._released: set[int] = set()
        self._returned: collections.deque[int] = collections.deque()
        self._lock = threading.Lock()
        self._last = 0

    def receive(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> Received:
        """Waits for step ``step``. Raises `ArgumentError` for one that does not grow, and what a wait raises."""
        if step <= self._last:
            raise ArgumentError(f"edge steps grow: step {step} after {self._last}")
        self._consumer.receive(step, timeout)
        self._last = step
        self._kept.append(step)
        at = self._offsets[step % len(self._offsets)]
        return Received(Hold(self._memory, at, self._spec.nbytes, self._give_back, step), self._spec)

    def ready(self) -> bool:
        """Whether the next step has arrived, counted by one."""
        return self._consumer.ready(self._last + 1)

    def _give_back(self, step: int) -> None:
        # The garbage collector may call this in the middle of itself: none waits for the lock, its holder looks again.
        self._returned.append(step)
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    self._released.add(self._returned.popleft())
                    self._tell()
            finally:
                self._lock.release()

    def _tell(self) -> None:
        last = 0
        while self._kept and self._kept[0] in self._released:
            last = self._kept.popleft()
            self._released.remove(last)
        if last:
            try:
                self._consumer.release(last)
            except (PeerLost, RegionClosed):
                pass  # nobody is there to use it
