"""The device contract. A new device is one file that implements it and passes the conformance suite.

Order on a channel: write -> write, write -> signal, write -> read. A completed write means that the source may be
reused and that the bytes are in the target's memory; only a signal tells the target.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from tensorwire._native import Life, Memory
from tensorwire.device.callbacks import Callbacks
from tensorwire.device.region import Access, Region, RemoteView, View
from tensorwire.errors import ArgumentError, OutOfMemory, PeerLost, RemoteAccessError, Unsupported
from tensorwire.observe import counters

Signal = tuple[RemoteView, int]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device can do beyond the contract's core."""

    maps: bool  # a peer's region can be mapped: born in the slot, sent by signal alone
    shares_registered: bool  # register() gives memory a peer can reach, not only a local source
    atomics: bool = True
    other_processes: bool = True  # peers may be devices of other processes
    one_sided: bool = True  # the memory of a process that was stopped can be written and read all the same
    sparse: bool = True  # allocate(reserve=False) takes no memory before it is used
    refuses_whole: bool = True  # a write whose signal is refused keeps its payload out, too
    refuses_midway: bool = True  # a read that has begun when its region is closed is refused, and nothing worse


class Completion(ABC):
    """What write and read return. It carries an error, never a status number."""

    @abstractmethod
    def wait(self, timeout: float = 60.0) -> None:
        """Returns when the operation is done; raises its error.

        Raises `RemoteAccessError`, `PeerLost`, or `WaitTimeout`: then the transfer goes on, and neither its source
        nor its target may be reused.
        """

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether ``wait`` would return or raise at once."""

    def on_done(self, call: Callable[[Completion], object]) -> None:
        """Calls ``call(completion)`` once when ``wait`` would return or raise at once.

        It runs in this thread if that is so already, else in a thread of the device: it should be short, and what it
        raises goes to ``sys.unraisablehook``.
        """
        if self.done:
            call(self)
        else:
            self._call_when_done(call)

    def _call_when_done(self, call: Callable[[Completion], object]) -> None:
        raise NotImplementedError  # of a device whose completions are not done at once

    def __await__(self) -> Generator[Any, None, None]:
        if not self.done:
            import asyncio  # whoever awaits has it; all others start faster without

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

    What moves bytes takes this process's memory first and the peer's second, whichever way they go, as verbs and MPI
    do: ``write(local, remote)``, ``read(local, remote)``.
    """

    def __init__(self, device: Device, life: Life) -> None:
        self.device = device
        self.life = life

    @abstractmethod
    def write(
        self, local: View, remote: RemoteView, signal: Signal | None = None, *, fence: bool = False
    ) -> Completion:
        """Puts ``local`` into the peer's memory at ``remote``, then raises the signal word. Sizes must be equal.

        ``fence``: the write begins after every earlier read and atomic of this channel is over; the call may wait for
        them. Raises `ArgumentError` at once for sizes that differ and for operands of another type, such as swapped
        ones; the completion carries what the target refused.
        """

    @abstractmethod
    def signal(self, target: RemoteView, value: int, *, fence: bool = False) -> Completion:
        """Sets the peer's 8-byte word, after every earlier write of this channel; ``fence`` as for ``write``."""

    @abstractmethod
    def read(self, local: View, remote: RemoteView) -> Completion:
        """Fills ``local`` from the peer's memory at ``remote``, as it is after every earlier write of this channel.

        Raises `ArgumentError` at once for sizes that differ and for operands of another type, such as swapped ones;
        the completion carries what the target refused.
        """

    @abstractmethod
    def fetch_add(self, target: RemoteView, value: int, timeout: float = 60.0) -> int:
        """Adds to the peer's 8-byte word, modulo 2**64; returns what it was."""

    @abstractmethod
    def compare_swap(self, target: RemoteView, expected: int, value: int, timeout: float = 60.0) -> int:
        """Replaces the peer's 8-byte word if it is ``expected``; returns what it was."""

    def map(self, target: RemoteView) -> Memory | None:
        """The peer's whole region as local memory, where this device can map it; else None.

        Raises `OutOfMemory` where there is no descriptor or address space left for it, as the first operation on a
        region does, too.
        """
        return None

    def batch(self) -> contextlib.AbstractContextManager[None]:
        """Inside it, what is posted on this channel may wait for the end, to go to the NIC together: cheaper for many
        small operations (verbs). A wait for one of them does not wait for the end."""
        return contextlib.nullcontext()

    @property
    def lanes(self) -> Sequence[Channel]:
        """Channels to the same peer that share this one's life; this one is the first. Many devices have but one.

        What goes over one lane keeps its order, and does not wait for the other lanes: between them there is no order.
        They end with this channel.
        """
        return (self,)

    @property
    def peer(self) -> str:
        """The process at the other end, in words, as in the messages of `PeerLost`."""
        return self.life.peer

    def on_lost(self, call: Callable[[str], None]) -> None:
        """Calls ``call(reason)`` once when the peer is lost; at once if it already is.

        Never for what this process itself closes.
        """
        self.device._call_when_lost(self, call)

    def settle(self, timeout: float = 60.0) -> None:
        """After the loss of the peer: returns when nothing of it can touch this process's memory any more.

        `PeerLost` comes first and says less: a process that is being killed may still have a thread in the middle of a
        store, and one that was stopped may go on. What the peer could write may be reused only after ``settle``. Call
        it before ``close``. Raises `WaitTimeout` (nothing is settled), or `ArgumentError` if the peer is not lost.
        """
        self._check_lost()

    @property
    def lost(self) -> bool:
        """Whether the peer is gone."""
        return self.life.lost or self.device.life.lost

    @abstractmethod
    def close(self) -> None:
        """Ends the channel; what is outstanding fails with `PeerLost`. Idempotent."""

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
    """This process's end of one transport."""

    name: str
    capabilities: Capabilities

    def __init__(self) -> None:
        self.life = Life()
        self.callbacks = Callbacks()
        self._regions: weakref.WeakSet[Region] = weakref.WeakSet()
        self._regions_lock = threading.Lock()

    @classmethod
    def for_job(cls, *, interface: str, heartbeat: float, lost_after: float) -> Device:
        """A device as a process of a job opens it. A device without such settings needs no version of its own.

        Args:
            interface: The address of the network interface to listen on.
            heartbeat: Seconds between two signs of life of this process.
            lost_after: Seconds of silence after which a peer is lost.

        Raises:
            DeviceError: If this machine cannot have such a device, as an error of `check_available`.
            ArgumentError: If the settings make no sense.
        """
        return cls()

    @classmethod
    def check_available(cls) -> None:
        """Raises `DeviceError` where this machine cannot have such a device. Opens nothing."""
        return

    @property
    @abstractmethod
    def address(self) -> bytes:
        """What a peer passes to ``connect``. A secret: it admits its holder."""

    @abstractmethod
    def connect(self, address: bytes, timeout: float = 30.0) -> Channel:
        """A channel to the peer with that address. Raises `PeerLost` or `AuthenticationError`."""

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
        """Zeroed, registered memory that a peer may be let into.

        ``reserve=False`` neither reserves nor touches it, on a device whose regions can be sparse: then lack of memory
        shows at first use.
        Raises `OutOfMemory` or `ArgumentError`.
        """
        if nbytes >= 2**64:
            raise OutOfMemory(f"cannot allocate a region of {nbytes} bytes: no address reaches that far")
        if nbytes < 0 or alignment < 1 or alignment & (alignment - 1) or alignment > 4096:
            raise ArgumentError("allocate: nbytes >= 0 and an alignment that is a power of two up to 4096")
        self._check_open()
        try:
            memory = self._find_memory(nbytes, reserve)
        except OSError as error:
            raise OutOfMemory(f"cannot allocate a region of {nbytes} bytes: {error.args[1]}") from None
        return self._adopt(memory)

    def _find_memory(self, nbytes: int, reserve: bool) -> Memory:
        """Zeroed memory at a multiple of 4096. Raises `OutOfMemory` or `OSError`."""
        return Memory.allocate(nbytes, reserve)

    def register(self, buffer: Any) -> Region:
        """Memory that exists already, as a region; anything contiguous with the buffer protocol or DLPack on the CPU.

        It must stay as it is until the region is dropped. Raises `ArgumentError` for other objects, and for arrays of
        Python objects: a peer would read and write pointers.
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
        memory.bind(self.life, None)

    def why_lost(self, channel: Channel | None = None) -> str:
        """A sentence for `PeerLost`."""
        if channel is not None and channel.life.closed:
            return f"{self.name}: {channel.life.reason}"
        if self.life.lost:
            return f"{self.name}: this device cannot be used any more: {self.life.reason}"
        if channel is not None and channel.life.lost:
            return f"{self.name}: {channel.peer or 'the peer'} is lost: {channel.life.reason}"
        return f"{self.name}: {self.life.last_loss}"

    def abort(self, reason: str) -> None:
        """Fails everything outstanding and wakes every waiter of this device."""
        self.life.lose(reason)

    def _call_when_lost(self, channel: Channel, call: Callable[[str], None]) -> None:
        def notify() -> None:
            if not channel.life.closed and not self.life.closed:
                call(self.why_lost(channel))

        token = self.callbacks.add(notify)
        channel.life.notify(self.callbacks.notices, token)
        self.life.notify(self.callbacks.notices, token)

    def _check_open(self) -> None:
        if self.life.lost:
            raise PeerLost(f"{self.name}: this device cannot be used any more: {self.life.reason}")

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_plain(what: str, array: Any) -> None:
    """The memory of ``array`` is there, and holds its values and nothing that only this process understands."""
    if array is None:
        raise ArgumentError(f"{what} needs memory with the buffer protocol or DLPack, and got None")
    if getattr(getattr(array, "dtype", None), "hasobject", False):
        raise ArgumentError(f"{what} needs plain numbers: this array holds Python objects")
    # PyTorch's DLPack leaves this out: the negative of what the tensor shows would be taken.
    is_negative = getattr(array, "is_neg", None)
    if callable(is_negative) and is_negative():
        raise ArgumentError(f"{what} needs memory as it is: this tensor is a negative view; call resolve_neg() first")
    if hasattr(array, "untyped_storage"):
        _check_storage(what, array)


def _check_storage(what: str, tensor: Any) -> None:
    """PyTorch shares by DLPack also what only stands for a tensor, and what lost its memory since (``resize_(0)``)."""
    try:
        storage = tensor.untyped_storage()
        end = tensor.storage_offset() + 1
        end += sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed, there = end * tensor.itemsize if tensor.numel() else 0, storage.nbytes()
    except (AttributeError, NotImplementedError, RuntimeError):  # no strides, or no storage: DLPack says what it is
        return
    if storage.device.type == "meta":
        raise ArgumentError(f"{what} needs memory, and a fake or meta tensor has none")
    if needed > there:
        raise ArgumentError(f"{what} needs memory: this tensor's storage has {there} of its {needed} bytes")


def check_sizes(source: int, target: int) -> None:
    """Both ends of a transfer have the same size."""
    if source != target:
        raise ArgumentError(f"sizes differ: {source} bytes into {target}")


def check_word(view: RemoteView) -> None:
    """A signal or atomic word is 8 aligned bytes."""
    if view.nbytes != 8 or view.offset % 8:
        raise ArgumentError("a signal or atomic word is a view of 8 bytes at a multiple of 8")


def check_fillable(view: View) -> None:
    """A read needs memory that can be written."""
    if not view.region.writable:
        raise ArgumentError("this memory is read-only: a read cannot fill it")


def check_value(*values: int) -> None:
    """A signal or atomic word holds 0 to 2**64 - 1. Raises `TypeError` for what is no integer."""
    for value in values:
        if not 0 <= operator.index(value) < 2**64:
            raise ArgumentError(f"a word holds 0 to 2**64 - 1, not {value}")


def check_signal(signal: Signal | None) -> None:
    """A signal names a word and a value that it can hold."""
    if signal is not None:
        check_word(signal[0])
        check_value(signal[1])


REFUSALS = {
    1: "no open region has that key",
    2: "out of the region's range",
    3: "the region is read-only for this key",
    4: "the word is not 8-byte aligned",
}


def refused(device: str, code: int) -> RemoteAccessError:
    """The error for a target's refusal."""
    return RemoteAccessError(f"{device}: the target refused: {REFUSALS.get(code, f'code {code}')}")


def unshared(device: str) -> Unsupported:
    """The error for showing a peer memory that the device cannot map."""
    return Unsupported(f"{device} shows peers only memory from allocate(): copy there, or use it as a source")
