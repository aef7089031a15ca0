"""Which device reaches a peer, and why: what ``auto`` decides by, and what ``tensorwire doctor`` explains."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tensorwire.device import Channel, Device, RemoteRegion
from tensorwire.errors import ArgumentError, AuthenticationError, PeerLost, RemoteAccessError


class Whereabouts(msgspec.Struct, frozen=True):
    """Where a process is, as far as sharing memory goes."""

    boot: str  # equal on one machine, until it starts anew
    network: str  # its network namespace: abstract Unix sockets do not cross it
    user: int
    users: str  # the user namespace that ``user`` is a number of


class Card(msgspec.Struct, frozen=True):
    """A member's entry in the address book."""

    where: Whereabouts
    shm: bytes | None
    probe: bytes | None
    tcp: bytes | None
    frameworks: tuple[str, ...] = ()  # that its process has loaded: servers load them meanwhile


@dataclass(frozen=True)
class Route:
    """The device by which a peer is reached, and why this one."""

    device: str
    why: str

    def __str__(self) -> str:
        return f"{self.device}: {self.why}"


def whereabouts(pid: int | None = None) -> Whereabouts:
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
            f"process {pid} cannot be looked at ({error.strerror}): ask as its user or as root"
        ) from None
    return Whereabouts(boot, network, user, users)


def _user(process: Path) -> int:
    line = next(line for line in (process / "status").read_text().splitlines() if line.startswith("Uid:"))
    return int(line.split()[2])  # the effective one


def why_not_shm(one: Whereabouts, other: Whereabouts) -> str | None:
    """What keeps two processes from sharing memory, as far as one can tell without trying; None: nothing."""
    if one.boot != other.boot:
        return "the processes run on different machines"
    if one.network != other.network:
        return "the processes are in different network namespaces, which Unix sockets without a name do not cross"
    if one.users == other.users and one.user != other.user:
        return f"the processes belong to different users ({one.user} and {other.user})"
    return None


def expected(one: Whereabouts, other: Whereabouts) -> Route:
    """What ``auto`` will take between two processes, unless trying it shows something else."""
    obstacle = why_not_shm(one, other)
    return Route("tcp", obstacle) if obstacle else Route("shm", "one machine, one network namespace, one user")


def connect(devices: Mapping[str, Device], here: Whereabouts, card: Card) -> tuple[Channel, Route]:
    """A channel over the best of our ``devices`` that reaches the member with that card.

    shm where a region of it really could be mapped, else tcp. Raises `PeerLost` with the reasons.
    """
    reasons = []
    if "shm" in devices and card.shm is not None and card.probe is not None:
        obstacle = why_not_shm(here, card.where)
        if obstacle is None:
            try:
                return _by_mapping(devices["shm"], card.shm, card.probe), Route("shm", "its memory could be mapped")
            except (PeerLost, RemoteAccessError, AuthenticationError) as error:
                obstacle = str(error).removeprefix("shm: ")
        reasons.append(obstacle)
    if "tcp" in devices and card.tcp is not None:
        why = f"not shm: {reasons[0]}" if reasons else "the device that both sides were told to use"
        return devices["tcp"].connect(card.tcp), Route("tcp", why)
    raise PeerLost(f"shm: {reasons[0]}" if reasons else "no device in common")


def _by_mapping(device: Device, address: bytes, probe: bytes) -> Channel:
    channel = device.connect(address)
    try:
        channel.map(RemoteRegion.unpack(probe).view())  # only a real mapping counts
    except BaseException:
        channel.close()
        raise
    return channel
