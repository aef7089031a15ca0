"""The location of a process, and the devices that can therefore reach it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from tensorwire.errors import ArgumentError


class Locality(msgspec.Struct, frozen=True):
    """Where a process is, as far as sharing memory goes."""

    boot: str  # equal on one machine, until it starts anew
    network: str  # its network namespace: abstract Unix sockets do not cross it
    user: int
    users: str  # the user namespace that ``user`` is a number of


def locality(pid: int | None = None) -> Locality:
    """Of this process, or of another one that we may look at. Raises `ArgumentError` for one that we may not."""
    process = Path("/proc", "self" if pid is None else str(pid))
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    users = str(Path("/proc/self/ns/user").readlink())  # numbers in /proc are those of the reader's namespace
    try:
        network = str((process / "ns/net").readlink())
        user = os.getuid() if pid is None else _user(process)
    except FileNotFoundError:
        raise ArgumentError(f"there is no process {pid} here") from None
    except OSError as error:
        raise ArgumentError(
            f"process {pid} cannot be inspected ({error.strerror}): run this as its user or as root"
        ) from None
    return Locality(boot, network, user, users)


def _user(process: Path) -> int:
    line = next(line for line in (process / "status").read_text().splitlines() if line.startswith("Uid:"))
    return int(line.split()[2])  # the effective one


def why_not_shm(one: Locality, other: Locality) -> str | None:
    """What keeps two processes from sharing memory, as far as is known without trying; None: nothing."""
    if one.boot != other.boot:
        return "the processes run on different machines"
    if one.network != other.network:
        return "the processes are in different network namespaces, which Unix sockets without a name do not cross"
    if one.users == other.users and one.user != other.user:
        return f"the processes belong to different users ({one.user} and {other.user})"
    return None


def apart(one: Locality, other: Locality) -> bool:
    """Whether a network lies between two processes: then verbs may be quicker than tcp."""
    return (one.boot, one.network) != (other.boot, other.network)


def stays_here(interface: str) -> bool:
    """Whether nobody outside this machine, or network namespace, reaches what listens on ``interface``."""
    return interface in ("localhost", "::1") or interface.startswith("127.")
