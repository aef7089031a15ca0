"""What the kernel and the network offer: sockets, features, interfaces."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import os
import platform
import secrets
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from tensorwire.device.interfaces import interface_address
from tensorwire.doctor.findings import Finding, Level, Section
from tensorwire.sizes import size_text

_FUTEX_WAITV = 449  # the same on every architecture


def _try(name: str, what: Callable[[], str], level: Level, advice: str) -> Finding:
    """``fine`` with what ``what()`` says, or ``level`` with its error."""
    try:
        return Finding(name, what())
    except (OSError, AttributeError) as error:
        return Finding(name, f"no: {error}", level, advice)


def kernel() -> Section:
    """Features of the kernel that devices use."""
    findings = (
        Finding("kernel", f"{platform.system()} {platform.release()} {platform.machine()}"),
        _try("memfd with seals", _memfd, "stops", "shm and every region need it: Linux 3.17, not blocked by a sandbox"),
        _try("pidfd", _pidfd, "note", "without it the end of a process is noticed later: Linux 5.3"),
        _try("futex_waitv", _futex_waitv, "note", "without it a peer's death on shm is noticed later: Linux 5.16"),
        _try(
            "/dev/shm",
            _dev_shm,
            "note",
            "versions that readers get go there, if they fit; PyTorch's DataLoader needs it",
        ),
    )
    return Section("kernel", findings)


def _memfd() -> str:
    fd = os.memfd_create("tensorwire-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    finally:
        os.close(fd)
    return "yes: memory without a name, so no size of /dev/shm limits it"


def _pidfd() -> str:
    os.close(os.pidfd_open(os.getpid()))
    return "yes"


def _futex_waitv() -> str:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall(ctypes.c_long(_FUTEX_WAITV), None, 0, 0, None, 0)  # no words to wait for: refused, where it exists
    number = ctypes.get_errno()
    if number != errno.EINVAL:
        raise OSError(number, os.strerror(number))
    return "yes"


def _dev_shm() -> str:
    usage = shutil.disk_usage("/dev/shm")
    return f"{size_text(usage.total)}, {size_text(usage.free)} free (used for versions that readers get)"


def sockets() -> Section:
    """Sockets that devices and control need."""
    findings = (
        _try("listen on 127.0.0.1", lambda: _listen("127.0.0.1"), "stops", "is the interface lo up? ip link set lo up"),
        _try("listen on ::1", lambda: _listen("::1"), "note", "needed only for addresses of IPv6"),
        _try("abstract Unix socket", _unix, "note", "without it there is no shm device: a sandbox blocks AF_UNIX"),
    )
    return Section("sockets", findings)


def _listen(interface: str) -> str:
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    with socket.socket(family) as listener, socket.socket(family) as other:
        listener.bind((interface, 0))
        listener.listen(1)
        other.settimeout(5.0)
        other.connect(listener.getsockname())
    return "yes"


def _unix() -> str:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as other:
        listener.bind(b"\0tensorwire-doctor-" + secrets.token_hex(8).encode())
        listener.listen(1)
        other.connect(listener.getsockname())
    return "yes"


def interfaces() -> Section:
    """Interfaces with their addresses and rates."""
    names = [name for _, name in socket.if_nameindex()]
    return Section("interfaces", tuple(_interface(name) for name in names))


def _interface(name: str) -> Finding:
    ipv4 = interface_address(name)
    addresses = [*([ipv4] if ipv4 else []), *_ipv6(name)]
    rate = _rate(name)
    words = [", ".join(addresses) or "no address", f"{rate} Mbit/s" if rate else "rate unknown", _state(name)]
    return Finding(name, "; ".join(words), number=rate)


def _ipv6(name: str) -> list[str]:
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return [str(ipaddress.IPv6Address(int(row[0], 16))) for row in rows if row[-1] == name]
    return []


def _rate(name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # virtual interfaces do not know
        return max(0, int(Path(f"/sys/class/net/{name}/speed").read_text())) or None
    return None


def _state(name: str) -> str:
    with contextlib.suppress(OSError):
        state = Path(f"/sys/class/net/{name}/operstate").read_text().strip()
        return "loopback" if name == "lo" else state
    return "state unknown"
