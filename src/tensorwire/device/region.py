"""Registered memory: this process's (regions, views) and a peer's (remote regions, remote views)."""

from __future__ import annotations

import errno
import functools
import re
import resource
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from tensorwire._native import Memory, RemoteView, View
from tensorwire.errors import ArgumentError, PeerLost, RegionClosed, WaitTimeout

__all__ = ["Access", "Region", "RemoteRegion", "RemoteView", "View", "check_name", "check_range"]

if TYPE_CHECKING:
    from tensorwire.device.contract import Channel, Device

Access = Literal["read", "write"]

# Version (8 bits), access (8) and length (48) as one number; the device's name, key, address.
_WIRE = struct.Struct("<Q8sQQ")
_VERSION = 2  # version 1 began with the letter T
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,7}", re.ASCII)


def check_name(name: str) -> None:
    """Refuses a name that no device may have: it travels in each remote region, in 8 bytes."""
    if not _NAME.fullmatch(name):
        raise ArgumentError(
            f"a device's name must be 1 to 8 lower-case letters, digits, '-' or '_', with a letter first, not {name!r}"
        )


@functools.lru_cache(64)  # edges pack and unpack regions for each tensor of unknown shape
def _pack_name(name: str) -> bytes:
    check_name(name)
    return name.encode()


@functools.lru_cache(64)
def _unpack_name(packed: bytes) -> str:
    name = packed.rstrip(b"\0").decode("latin-1")
    check_name(name)
    return name


def check_range(what: str, offset: int, nbytes: int, length: int) -> None:
    """Refuses a span that does not lie within ``length`` bytes."""
    if offset < 0 or nbytes < 0 or offset + nbytes > length:
        raise ArgumentError(f"{what}: bytes {offset}..{offset + nbytes} are outside its {length} bytes")


def in_words(error: OSError) -> str:
    """Why the kernel gave no memory. Each region is a file in memory."""
    if error.errno != errno.EMFILE:
        return str(error.args[1])
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process may open no more files: raise ulimit -n (now {most}), make keys in one call of init(), or "
        "close() optimizers and keys that are no longer needed"
    )


class Region(Memory):
    """A span of registered memory of one device, with the buffer protocol and DLPack. A context manager.

    ``Device.allocate`` and ``Device.register`` return regions. A region keeps its device alive. After ``close()`` peers
    are refused, while arrays over its memory stay valid until they are dropped.

    Attributes:
        device: The device of the region.
        nbytes (int): The size in bytes.
        writable (bool): Whether it may be written.
        closed (bool): Whether ``close()`` was called.
        keys: The keys that admit peers, by access, for implementations of devices.
    """

    def __init__(self, device: Device, memory: Memory, withdraw: Callable[[Region], None]) -> None:
        super().__init__(memory)
        self.device = device
        self.keys: dict[str, int] = {}
        self._withdraw = withdraw

    def view(self, offset: int = 0, nbytes: int | None = None) -> View:
        """Returns a part of the region, for transfers. Views can be kept and used again.

        Args:
            offset: Where it begins, in bytes.
            nbytes: Its size in bytes; by default all up to the end of the region.

        Returns:
            The part; its ``buffer`` is a memoryview of the bytes.

        Raises:
            ArgumentError: It does not lie within the region.
        """
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        check_range("region", offset, nbytes, self.nbytes)
        return View(self, offset, nbytes)

    def remote(self, access: Access = "write") -> RemoteRegion:
        """Gives access to this region: any holder of the result may use it until ``close()``.

        Args:
            access: ``"write"``: read and write; ``"read"``: only read.

        Returns:
            The peer's key to the region; ``pack()`` makes bytes of it.

        Raises:
            RegionClosed: The region was closed.
            Unsupported: The device cannot give peers access to this memory.
            ArgumentError: ``access`` is neither, or ``"write"`` for memory that is read-only.
        """
        if self.closed:
            raise RegionClosed("this region was closed: allocate another one")
        if access not in ("read", "write"):
            raise ArgumentError(f"access must be 'read' or 'write', not {access!r}")
        if access == "write" and not self.writable:
            raise ArgumentError("this memory is read-only: ask for access='read'")
        key = self.device._expose(self, access)
        return RemoteRegion(self.device.name, key, self.nbytes, access)

    def wait(  # type: ignore[override]  # raises where Memory's returns a number
        self, offset: int, at_least: int, timeout: float, channel: Channel | None = None
    ) -> None:
        """Waits until a signal word has reached a value. It looks for 5 to 100 us, as this thread's last waits teach,
        and then sleeps, without the GIL.

        Args:
            offset: Where the word is, in bytes: 8 bytes at a multiple of 8.
            at_least: The value to wait for.
            timeout: Seconds to wait.
            channel: The channel whose loss ends the wait; None: the loss of any channel of the device does.

        Raises:
            WaitTimeout: The word may still be written later.
            PeerLost: The peer is gone.
            RegionClosed: The region was closed before, or meanwhile.
            ArgumentError: There is no such word in this region.
        """
        try:
            outcome = self._wait(offset, at_least, timeout, None if channel is None else channel.liveness)
        except (IndexError, TypeError, ValueError):
            check_range("region", offset, 8, self.nbytes)
            if (self.address + offset) % 8 or not 0 <= at_least < 2**64:
                raise ArgumentError("a signal word must be 8-byte aligned and hold 0 to 2**64 - 1") from None
            raise
        if outcome:
            self._raise(outcome, at_least, timeout, channel)

    _wait = Memory.wait  # the short way on the hot path: the native method itself

    def _raise(self, outcome: int, at_least: int, timeout: float, channel: Channel | None) -> NoReturn:
        if outcome == 1:
            raise WaitTimeout(f"a signal did not reach {at_least} within {timeout:g} s; it may still arrive")
        if self.closed:
            raise RegionClosed("this region was closed: nothing can arrive in it any more")
        raise PeerLost(self.device.why_lost(channel))

    def close(self) -> None:
        """Ends every capability for this region. Idempotent."""
        self.mark_closed()
        self._withdraw(self)  # also where another thread has just begun to: the keys end before either returns

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.nbytes

    def __dlpack__(self, **options: Any) -> Any:
        """The bytes as an array of uint8, without a copy; the array keeps the memory. Refused for read-only memory."""
        import numpy

        if not self.writable and not options.get("copy"):  # consumers exist that write there all the same
            raise ArgumentError(
                "this memory is read-only, which DLPack cannot enforce: use the buffer protocol or a copy"
            )
        return numpy.frombuffer(memoryview(self), numpy.uint8).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU

    def __repr__(self) -> str:
        return f"<{self.device.name} region of {self.nbytes} bytes{', closed' if self.closed else ''}>"


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A capability for a peer's region, which ``Region.remote`` returns there.

    Attributes:
        device: The name of the device.
        key: What admits to the region.
        length: Its size in bytes.
        access: ``"read"`` or ``"write"``.
        address: Where the region begins in the peer's address space, where the device needs that; otherwise 0.
    """

    device: str
    key: int
    length: int
    access: Access
    address: int = 0

    def view(self, offset: int = 0, nbytes: int | None = None) -> RemoteView:
        """Returns a part of the peer's region, for transfers.

        Args:
            offset: Where it begins, in bytes.
            nbytes: Its size in bytes; by default all up to the end of the region.

        Returns:
            The part, to write to or read from.

        Raises:
            ArgumentError: It does not lie within the region.
        """
        nbytes = self.length - offset if nbytes is None else nbytes
        check_range("remote region", offset, nbytes, self.length)
        return RemoteView(self, offset, nbytes)

    def pack(self) -> bytes:
        """Packs the capability, to send it to the peer.

        Returns:
            32 bytes. They are a secret: they give access to any holder.

        Raises:
            ArgumentError: A field does not fit.
        """
        device = _pack_name(self.device)
        head = _VERSION | (0x100 if self.access == "write" else 0) | self.length << 16
        try:
            return _WIRE.pack(head, device, self.key, self.address)
        except struct.error as error:
            raise ArgumentError(f"not a remote region that can be sent: {error}") from None

    @classmethod
    def unpack(cls, data: bytes) -> RemoteRegion:
        """Unpacks a capability.

        Args:
            data: The 32 bytes of ``pack``.

        Returns:
            The capability.

        Raises:
            ArgumentError: They are anything else, or of another version of Tensorwire.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)) or len(data) != _WIRE.size:
            raise ArgumentError(f"a remote region is {_WIRE.size} bytes")
        head, name, key, address = _WIRE.unpack(data)
        access = head >> 8 & 0xFF
        if head & 0xFF != _VERSION or access > 1:
            raise ArgumentError("not a remote region of this version of Tensorwire")
        return cls(_unpack_name(name), key, head >> 16, "write" if access else "read", address)
