"""The device contract. A new device is one file that implements it and passes the conformance suite.

Order on a channel: write -> write, write -> signal, write -> read. A completed write means that the source may be
reused and that the bytes are in the target's memory; only a signal informs the target.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from tensorwire._native import Liveness, Memory
from tensorwire.device.callbacks import Callbacks
from tensorwire.device.checks import check_plain
from tensorwire.device.copy_choice import choose_copy
from tensorwire.device.region import Access, Region, RemoteView, View, in_words
from tensorwire.errors import ArgumentError, OutOfMemory, PeerLost
from tensorwire.observe import counters

Signal = tuple[RemoteView, int]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties of a device beyond the contract's core.

    Attributes:
        maps: A peer's region can be mapped: data written there needs no transfer, only a signal.
        shares_registered: Peers can reach memory of ``register()``, which otherwise is only a local source or target.
        atomics: Channels have ``fetch_add`` and ``compare_swap``.
        other_processes: Peers may be devices of other processes.
        one_sided: The memory of a stopped process (SIGSTOP) can still be written and read.
        sparse: ``allocate(reserve=False)`` takes no memory before it is used.
        refuses_whole: A write whose signal is refused keeps its payload out, too.
        refuses_midway: A read that has begun when its region is closed is refused, without further consequences.
    """

    maps: bool
    shares_registered: bool
    atomics: bool = True
    other_processes: bool = True
    one_sided: bool = True
    sparse: bool = True
    refuses_whole: bool = True
    refuses_midway: bool = True


class Completion(ABC):
    """The result of ``write``, ``signal`` and ``read``. It carries an error, never a status number.

    Coroutines ``await`` it; threads call ``wait``.
    """

    @abstractmethod
    def wait(self, timeout: float = 60.0) -> None:
        """Returns when the operation is done.

        Args:
            timeout: Seconds to wait.

        Raises:
            RemoteAccessError: The target refused the operation; its memory is unchanged.
            PeerLost: The peer is gone, or the channel was closed.
            WaitTimeout: The operation goes on, so neither its source nor its target may be reused.
        """

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether ``wait`` would return, or raise the operation's error, at once."""

    def on_done(self, call: Callable[[Completion], object]) -> None:
        """Calls ``call(completion)`` once, as soon as ``wait`` would return or raise at once.

        Args:
            call: Runs in this thread if the operation is done already, otherwise in a thread of the device. It should
                be short; its exceptions go to ``sys.unraisablehook``.
        """
        if self.done:
            call(self)
        else:
            self._call_when_done(call)

    def _call_when_done(self, call: Callable[[Completion], object]) -> None:
        raise NotImplementedError  # of a device whose completions are not done at once

    def __await__(self) -> Generator[Any, None, None]:
        if not self.done:
            import asyncio  # those that await have imported it; all others start faster without

            loop = asyncio.get_running_loop()
            event = asyncio.Event()

            def wake(_: Completion) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits there
                    loop.call_soon_threadsafe(event.set)

            self.on_done(wake)
            yield from event.wait().__await__()
        self.wait()


class Done(Completion):
    """The completion of an operation that was over when the call returned."""

    @property
    def done(self) -> bool:
        return True

    def wait(self, timeout: float = 60.0) -> None:
        return


DONE = Done()


class Failed(Done):
    """The completion of an operation that was refused before the call returned."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self, timeout: float = 60.0) -> None:
        raise self._error.with_traceback(None)


class Channel(ABC):
    """A reliable, ordered connection from this device to a peer's. Safe to use from several threads.

    Both ways of moving bytes take this process's memory first and the peer's second, as verbs and MPI do:
    ``write(local, remote)``, ``read(local, remote)``. ``Device.connect`` and `connect_peer` return channels.

    Attributes:
        device: The device of this process to which the channel belongs.
        liveness: The state of the connection, for implementations of channels.
        known_as: The peer's name in messages, such as ``worker 0``; '': its process or address.
    """

    def __init__(self, device: Device, liveness: Liveness) -> None:
        self.device, self.liveness = device, liveness
        self.known_as = ""

    @abstractmethod
    def write(
        self, local: View, remote: RemoteView, signal: Signal | None = None, *, fence: bool = False
    ) -> Completion:
        """Puts ``local`` into the peer's memory at ``remote``, and then sets a signal word there.

        Args:
            local: The bytes to send; they must not change before the completion.
            remote: Their destination, of the same size.
            signal: The word to set once the payload has arrived, and its value: a view of 8 bytes at a multiple of 8,
                and 0 to 2**64 - 1, larger than the values before. None: no signal.
            fence: Begin after every earlier read and atomic of this channel is over; the call may wait for them.

        Returns:
            A completion, done when the bytes are in the peer's memory; it carries a refusal by the target.

        Raises:
            ArgumentError: The sizes differ, or an operand has another type, such as a swapped one. Nothing was sent.
            RegionClosed: The region of ``local`` was closed.
            PeerLost: The peer is gone.
        """

    @abstractmethod
    def signal(self, target: RemoteView, value: int, *, fence: bool = False) -> Completion:
        """Sets the peer's signal word, after every earlier write of this channel has arrived.

        Args:
            target: The word: 8 bytes at a multiple of 8.
            value: 0 to 2**64 - 1, larger than the values before.
            fence: As for ``write``.

        Returns:
            A completion, done when the word is set.

        Raises:
            ArgumentError: The target is no such word, or the value does not fit.
            PeerLost: The peer is gone.
        """

    @abstractmethod
    def read(self, local: View, remote: RemoteView) -> Completion:
        """Fills ``local`` from the peer's memory at ``remote``, as it is after every earlier write of this channel.

        Args:
            local: The bytes' destination, in writable memory.
            remote: Their source, of the same size.

        Returns:
            A completion, done when the bytes are in ``local``; it carries a refusal by the target.

        Raises:
            ArgumentError: The sizes differ, or an operand has another type, such as a swapped one. Nothing was read.
            RegionClosed: The region of ``local`` was closed.
            PeerLost: The peer is gone.
        """

    @abstractmethod
    def fetch_add(self, target: RemoteView, value: int, timeout: float = 60.0) -> int:
        """Adds to a word of the peer, atomically among operations of this kind of device.

        Args:
            target: The word: 8 bytes at a multiple of 8.
            value: The number to add, modulo 2**64.
            timeout: Seconds to wait for the answer.

        Returns:
            The word's old value.

        Raises:
            RemoteAccessError: The target refused.
            WaitTimeout: No answer came in time; the word may change later.
            PeerLost: The peer is gone.
        """

    @abstractmethod
    def compare_swap(self, target: RemoteView, expected: int, value: int, timeout: float = 60.0) -> int:
        """Replaces a word of the peer if it has the expected value, atomically as ``fetch_add``.

        Args:
            target: The word: 8 bytes at a multiple of 8.
            expected: The value to replace.
            value: The new value.
            timeout: Seconds to wait for the answer.

        Returns:
            The word's old value: ``expected`` if it was replaced.

        Raises:
            RemoteAccessError: The target refused.
            WaitTimeout: No answer came in time; the word may change later.
            PeerLost: The peer is gone.
        """

    def map(self, target: RemoteView) -> Memory | None:
        """Maps the peer's whole region into this process, where the device can do so.

        Args:
            target: Any part of the region.

        Returns:
            The region as local memory with the buffer protocol; None where it cannot be mapped.

        Raises:
            OutOfMemory: No descriptor or address space is left. The first operation on a region may raise it, too.
        """
        return None

    def batch(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager in which verbs hands many small operations to the NIC together."""
        return contextlib.nullcontext()

    @property
    def lanes(self) -> Sequence[Channel]:
        """Channels to the same peer that end with this one, which is the first of them. Most devices have only one.

        Operations on one lane keep their order; between lanes there is no order.
        """
        return (self,)

    @property
    def peer(self) -> str:
        """The process at the other end, in words, as in the messages of `PeerLost`."""
        return self.known_as or self.liveness.peer

    def on_lost(self, call: Callable[[str], None]) -> None:
        """Calls ``call(reason)`` once when the peer is lost; at once if it is lost already.

        A channel or device that this process closes is no loss.

        Args:
            call: Takes one sentence, which names the peer and the cause.
        """
        self.device._call_when_lost(self, call)

    def settle(self, timeout: float = 60.0) -> None:
        """Waits, after the loss of the peer, until the peer can no longer touch this process's memory.

        `PeerLost` comes earlier: a process that is being killed may still have a thread in the middle of a store, and
        one that was stopped may continue. Memory that the peer could write may be reused only after ``settle``. Call it
        before ``close``.

        Args:
            timeout: Seconds to wait.

        Raises:
            WaitTimeout: The peer may still write.
            ArgumentError: The peer is not lost.
        """
        self._check_lost()

    @property
    def lost(self) -> bool:
        """Whether the peer is gone."""
        return self.liveness.lost or self.device.liveness.lost

    @abstractmethod
    def close(self) -> None:
        """Ends the channel; outstanding operations fail with `PeerLost`. Idempotent."""

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_lost(self) -> None:
        if not self.lost:
            raise ArgumentError(f"{self.device.name}: {self.peer} is not lost: it may write at any time")

    def _check_alive(self) -> None:
        if self.lost:
            raise PeerLost(self.device.why_lost(self))


class Device(ABC):
    """This process's end of one transport. A context manager that closes it.

    Attributes:
        name: The device's name: 1 to 8 lower-case letters, digits, ``-`` or ``_``, with a letter first.
        capabilities: The properties on which devices differ.
        liveness: Whether the device can still be used, for implementations of devices.
        callbacks: The thread that runs callbacks, for implementations of devices.
    """

    name: str
    capabilities: Capabilities

    def __init__(self) -> None:
        choose_copy()
        self.liveness = Liveness()
        self.callbacks = Callbacks()
        self._regions: weakref.WeakSet[Region] = weakref.WeakSet()
        self._regions_lock = threading.Lock()

    @classmethod
    def for_job(cls, *, interface: str, heartbeat: float, lost_after: float) -> Device:
        """Opens a device as a process of a job does. A device that has none of these settings need not override it.

        Args:
            interface: The IP address of the network interface to listen on.
            heartbeat: Seconds between two signs of life of this process.
            lost_after: Seconds of silence after which a peer is lost.

        Returns:
            The open device.

        Raises:
            DeviceError: This machine cannot have such a device; `check_available` raises the same.
            ArgumentError: The settings are wrong.
        """
        return cls()

    @classmethod
    def check_available(cls) -> None:
        """Checks, without opening anything, whether this machine can have such a device.

        Raises:
            DeviceError: It cannot; the message names the obstacle.
        """
        return

    @property
    @abstractmethod
    def address(self) -> bytes:
        """The bytes that a peer passes to ``connect``. They are a secret: their holder can connect."""

    @abstractmethod
    def connect(self, address: bytes, timeout: float = 30.0) -> Channel:
        """Connects to a peer's device of the same kind.

        Args:
            address: The peer's ``address``.
            timeout: Seconds to wait for it.

        Returns:
            A channel to that peer.

        Raises:
            ArgumentError: The bytes are not the address of such a device.
            AuthenticationError: The device there does not admit this address.
            PeerLost: The peer could not be reached in time, or is gone.
        """

    @abstractmethod
    def _expose(self, region: Region, access: Access) -> int:
        """A key that admits peers to ``region``."""

    @abstractmethod
    def _withdraw(self, region: Region) -> None:
        """Ends every key of ``region``."""

    @abstractmethod
    def close(self) -> None:
        """Ends every channel and region of this device. Idempotent."""

    def allocate(self, nbytes: int, alignment: int = 4096, *, reserve: bool = True) -> Region:
        """Allocates zeroed, registered memory, to which peers can be given access.

        Args:
            nbytes: The size in bytes, 0 or more.
            alignment: The alignment in bytes, a power of two up to 4096.
            reserve: Touch all pages now. False: where `Capabilities.sparse`, pages are taken when they are first used,
                and lack of memory shows only then.

        Returns:
            The region.

        Raises:
            OutOfMemory: There is not enough memory.
            ArgumentError: A number is out of range.
        """
        if nbytes >= 2**64:
            raise OutOfMemory(f"cannot allocate a region of {nbytes} bytes: no address reaches that far")
        if nbytes < 0 or alignment < 1 or alignment & (alignment - 1) or alignment > 4096:
            raise ArgumentError("allocate: nbytes must be 0 or more, and alignment a power of two up to 4096")
        self._check_open()
        try:
            memory = self._find_memory(nbytes, reserve)
        except OSError as error:
            raise OutOfMemory(f"cannot allocate a region of {nbytes} bytes: {in_words(error)}") from None
        return self._adopt(memory)

    def _find_memory(self, nbytes: int, reserve: bool) -> Memory:
        """Zeroed memory at a multiple of 4096. Raises `OutOfMemory` or `OSError`."""
        return Memory.allocate(nbytes, reserve)

    def register(self, buffer: Any) -> Region:
        """Makes existing memory a region, without a copy.

        Args:
            buffer: Contiguous memory with the buffer protocol or DLPack on the CPU, such as a numpy array or a torch
                tensor, of any shape and dtype but Python objects. It must keep its size and place until the region is
                dropped.

        Returns:
            The region. Without `Capabilities.shares_registered`, it can only be a local source or target.

        Raises:
            ArgumentError: The memory is not contiguous, holds Python objects, or is no memory at all.
        """
        self._check_open()
        check_plain("register", buffer)
        try:
            memory = Memory.wrap(buffer)
        except (TypeError, BufferError, ValueError, RuntimeError) as error:
            raise ArgumentError(
                f"register needs contiguous memory with the buffer protocol or DLPack, such as a copy of it: {error}"
            ) from None
        return self._adopt(memory, buffer)

    def _adopt(self, memory: Memory, buffer: Any = None) -> Region:
        """A region of ``memory``, which ``register`` found in ``buffer``."""
        counters.add(registrations=1)
        return self._keep(Region(self, memory, self._withdraw))

    def _keep(self, region: Region) -> Region:
        self._bind(region)
        with self._regions_lock:
            self._regions.add(region)
        return region

    def _close_regions(self) -> None:
        with self._regions_lock:
            regions = list(self._regions)
        for region in regions:
            region.close()

    def _bind(self, memory: Memory) -> None:
        memory.bind(self.liveness, None)

    def why_lost(self, channel: Channel | None = None) -> str:
        """Explains a loss.

        Args:
            channel: The channel of this device to which it belongs; None: the device itself.

        Returns:
            The sentence of the `PeerLost`.
        """
        if channel is not None and channel.liveness.closed:
            return f"{self.name}: {channel.liveness.reason}"
        if self.liveness.lost:
            return f"{self.name}: this device cannot be used any more: {self.liveness.reason}"
        if channel is not None and channel.liveness.lost:
            return f"{self.name}: {channel.peer or 'the peer'} is lost: {channel.liveness.reason}"
        return f"{self.name}: {self.liveness.last_loss}"

    def abort(self, reason: str) -> None:
        """Fails every outstanding operation and wakes every waiter of this device, which cannot be used any more.

        Args:
            reason: What their errors say.
        """
        self.liveness.lose(reason)

    def _call_when_lost(self, channel: Channel, call: Callable[[str], None]) -> None:
        def notify() -> None:
            if not channel.liveness.closed and not self.liveness.closed:
                call(self.why_lost(channel))

        token = self.callbacks.add(notify)
        channel.liveness.notify(self.callbacks.notices, token)
        self.liveness.notify(self.callbacks.notices, token)

    def _check_open(self) -> None:
        if self.liveness.lost:
            raise PeerLost(f"{self.name}: this device cannot be used any more: {self.liveness.reason}")

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
