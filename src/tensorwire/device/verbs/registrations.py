"""Registrations with the NIC: made, counted and ended here, and kept for good in a forked child.

Registration pins pages, and the kernel limits how many bytes a process may pin.
"""

from __future__ import annotations

import errno
import functools
import os
import resource
import weakref
from pathlib import Path
from typing import Protocol

from tensorwire.device.region import Access
from tensorwire.device.verbs.library import load
from tensorwire.errors import ArgumentError, OutOfMemory, PeerLost
from tensorwire.observe import counters

_SCARCE = (errno.ENOMEM, errno.EPERM, errno.EAGAIN)


def local_access(*, writable: bool = True) -> int:
    """What this process's own NIC may do with memory: read it, and fill it if it is ``writable``."""
    return int(load().AccessFlags.LOCAL_WRITE) if writable else 0


def remote_access(access: Access) -> int:
    """What a peer with a capability of that access may do."""
    flag = load().AccessFlags
    if access == "read":
        return int(flag.REMOTE_READ)
    return int(flag.LOCAL_WRITE | flag.REMOTE_WRITE | flag.REMOTE_READ | flag.REMOTE_ATOMIC)


class MR(Protocol):
    """A registration, as ``ibverbs.MR`` has it."""

    @property
    def addr(self) -> int: ...
    @property
    def lkey(self) -> int: ...
    @property
    def rkey(self) -> int: ...
    def close(self) -> None: ...


class Domain(Protocol):
    """A protection domain, as ``ibverbs.PD`` is one."""

    def reg_mr(self, addr: int, length: int, access: int, /) -> MR: ...


def pinned_bytes() -> int:
    """Bytes that registrations of this process pin now, as the kernel counts them (overlapping ones each)."""
    return int(Path("/proc/self/status").read_text().partition("VmPin:")[2].split()[0]) * 1024


class Registrations:
    """The open registrations of one protection domain. Not safe to use from several threads."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._open: set[MR] = set()
        self._closed = False
        _all.add(self)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, address: int, nbytes: int, access: int) -> MR:
        """Registers memory that the caller keeps. Raises `OutOfMemory`, or `ArgumentError` for other refusals."""
        if self._closed:
            raise PeerLost("verbs: this device cannot be used any more: the device was closed")
        try:
            mr = self._domain.reg_mr(address, nbytes, access)
        except OSError as error:
            raise _refused(nbytes, error) from None
        counters.add(registrations=1)
        self._open.add(mr)
        return mr

    def end(self, mr: MR) -> None:
        """The NIC forgets that memory. Idempotent."""
        if mr in self._open:
            self._open.remove(mr)
            mr.close()

    def close(self) -> None:
        """Ends them all. Idempotent."""
        self._closed = True
        while self._open:
            self._open.pop().close()


def _refused(nbytes: int, error: OSError) -> Exception:
    why = os.strerror(error.errno) if error.errno else str(error)
    if error.errno not in _SCARCE:
        return ArgumentError(f"verbs: this memory of {nbytes} bytes cannot be registered: {why}")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
    return OutOfMemory(
        f"verbs: {nbytes} bytes cannot be pinned for the NIC: {why}. This process pins {pinned_bytes()} bytes, and its "
        f"limit (RLIMIT_MEMLOCK) is {allowed}. To raise it: ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd "
        "unit; docker run --ulimit memlock=-1"
    )


# A forked child shares its parent's descriptors of the NIC: a registration that is garbage there must not end the
# parent's. So the child keeps them.
_all: weakref.WeakSet[Registrations] = weakref.WeakSet()
_inherited: list[Registrations] = []

os.register_at_fork(after_in_child=functools.partial(_inherited.extend, _all))
