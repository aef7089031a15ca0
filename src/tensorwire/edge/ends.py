"""The ends of a connected edge: the same calls for every kind."""

from __future__ import annotations

import abc
import collections
import threading
from typing import Any

from tensorwire._native import Hold
from tensorwire.device import Region
from tensorwire.edge.garbage_collection import garbage_collection
from tensorwire.edge.received import Received
from tensorwire.edge.static import DEFAULT_TIMEOUT, Consumer, Producer
from tensorwire.errors import ArgumentError, PeerLost, RegionClosed


class ProducerEnd(abc.ABC):
    """The sending end of a connected edge; made by ``connect_edge``. One thread at a time.

    ``fill`` copies a tensor and ``send`` sends it. To avoid the copy, compute into registered memory: ``slot(step)`` of
    static and bounded edges, ``room(nbytes)`` of dynamic ones.
    """

    @abc.abstractmethod
    def fill(self, step: int, tensor: Any, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Copies ``tensor`` for step ``step``; ``send`` sends it.

        Args:
            step: The step to send it in; steps grow.
            tensor: Any array on the CPU with the buffer protocol or DLPack, strided or not. It may be overwritten as
                soon as this returns.
            timeout: Seconds to wait for the consumer to release memory.

        Raises:
            ArgumentError: The step does not grow, the edge does not carry such a tensor, or it is no such array.
            OutOfMemory: It does not fit into the pool of a dynamic edge, even if all leases end.
            PeerLost, WaitTimeout: The consumer is gone, or released nothing in time; you may try again.
        """

    @abc.abstractmethod
    def send(self, step: int) -> None:
        """Sends the tensor that lies in the memory of step ``step``.

        Args:
            step: The step, which was filled.

        Raises:
            ArgumentError: The step has no tensor.
        """

    @abc.abstractmethod
    def flush(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Returns when everything sent is in the consumer's memory.

        Args:
            timeout: Seconds to wait.

        Raises:
            PeerLost, WaitTimeout: An earlier send failed, or is not over yet.
        """

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Whether the memory was given back."""

    def close(self, timeout: float = 60.0) -> None:
        """Flushes, and gives the memory back. Idempotent.

        The end waits until the consumer has released payload that it reads in this process's memory.

        Args:
            timeout: Seconds to wait.

        Raises:
            WaitTimeout: That took longer; the memory is given back all the same.
        """
        if self.closed:
            return
        try:
            self._settle(timeout)
        except PeerLost:
            pass  # nobody is there to see it
        finally:
            self.abandon()

    def _settle(self, timeout: float) -> None:
        """Returns when the memory may be given back."""
        self.flush(timeout)

    @abc.abstractmethod
    def abandon(self) -> None:
        """Gives the memory back, whatever is on its way. Idempotent."""

    def __enter__(self) -> ProducerEnd:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class ConsumerEnd(abc.ABC):
    """The receiving end of a connected edge; made by ``connect_edge``. It receives every step that is sent.

    One thread at a time; received tensors may be released in any thread.
    """

    @abc.abstractmethod
    def receive(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> Received:
        """Waits for the tensor of step ``step``.

        Args:
            step: The step; steps grow.
            timeout: Seconds to wait for it.

        Returns:
            The tensor. Its memory returns to the producer when nothing refers to it.

        Raises:
            ArgumentError: The step does not grow.
            OutOfMemory: There is no memory to read a tensor of a dynamic edge into: release others, and try again.
            PeerLost, WaitTimeout: The producer is gone, or sent nothing in time; you may wait again.
            ProtocolError: The producer sent something else, such as another step.
        """

    @abc.abstractmethod
    def ready(self) -> bool:
        """Looks for the next step.

        Returns:
            Whether it has arrived, so that ``receive`` would not wait.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Gives the memory back; tensors that are still kept stay as they are. Idempotent."""

    def __enter__(self) -> ConsumerEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StaticProducer(ProducerEnd):
    """The sending end for tensors of one shape, born in the consumer's slots where these are mapped."""

    def __init__(self, producer: Producer, memory: Region) -> None:
        self._producer, self._memory = producer, memory

    def slot(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> memoryview:
        """Waits until the consumer has given the slot back.

        Args:
            step: The step; steps grow.
            timeout: Seconds to wait.

        Returns:
            The memory in which the tensor of this step is to be born.

        Raises:
            ArgumentError: The step does not grow.
            PeerLost, WaitTimeout: The consumer is gone, or released nothing in time; you may try again.
        """
        return self._producer.slot(step, timeout)

    def fill(self, step: int, tensor: Any, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._producer.fill(step, tensor, timeout)

    def send(self, step: int) -> None:
        self._producer.send(step)

    def flush(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._producer.flush(timeout)

    @property
    def closed(self) -> bool:
        return self._memory.closed

    def abandon(self) -> None:
        self._memory.close()


class StaticConsumer(ConsumerEnd):
    """The receiving end for tensors of one shape.

    What was received may be released in any order. The credit word says up to which step all slots came back: a slot
    that is kept holds back those after it.
    """

    def __init__(self, consumer: Consumer, memory: Region, offsets: list[int]) -> None:
        assert consumer.spec is not None
        self._consumer, self._memory, self._offsets, self._spec = consumer, memory, offsets, consumer.spec
        self._kept: collections.deque[int] = collections.deque()  # steps, in the order in which they came
        self._released: set[int] = set()
        self._returned: collections.deque[int] = collections.deque()
        self._lock = threading.Lock()
        self._last = 0
        garbage_collection.watch()

    def receive(self, step: int, timeout: float = DEFAULT_TIMEOUT) -> Received:
        if step <= self._last:
            raise ArgumentError(f"edge steps grow: step {step} after {self._last}")
        self._give_all()
        self._consumer.receive(step, timeout)
        self._last = step
        self._kept.append(step)
        at = self._offsets[step % len(self._offsets)]
        return Received(Hold(self._memory, at, self._spec.nbytes, self._give_back, step), self._spec)

    def ready(self) -> bool:
        self._give_all()
        return self._consumer.ready(self._last + 1)

    def close(self) -> None:
        self._memory.close()

    def _give_back(self, step: int) -> None:
        self._returned.append(step)
        if not garbage_collection.running():  # it may have interrupted the sending of something else
            self._give_all()

    def _give_all(self) -> None:
        # In any thread: none waits for the lock, its holder looks again.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    self._released.add(self._returned.popleft())
                    self._give_credit()
            finally:
                self._lock.release()

    def _give_credit(self) -> None:
        last = 0
        while self._kept and self._kept[0] in self._released:
            last = self._kept.popleft()
            self._released.remove(last)
        if last:
            try:
                self._consumer.release(last)
            except (PeerLost, RegionClosed):
                pass  # nobody is there to use it
