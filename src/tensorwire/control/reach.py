"""Which device reaches a peer, and why: what ``auto`` decides by, and what ``tensorwire doctor`` explains."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tensorwire.device import Channel, Device, RemoteRegion
from tensorwire.errors import ArgumentError, AuthenticationError, DeviceError, OutOfMemory, PeerLost, RemoteAccessError

PROBE_SECONDS = 2.0  # in which verbs has to connect, and then to write, to be taken
TOLD = "the device that both sides were told to use"
# From what this side found about verbs ('': it works, else why not) to what counts for both sides.
Agree = Callable[[str], str]


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
    verbs: bytes | None = None
    verbs_probe: bytes | None = None  # 8 bytes that anybody in the job may write
    host: str = ""  # the address on which it listens


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


def apart(one: Whereabouts, other: Whereabouts) -> bool:
    """Whether a network lies between two processes: then verbs may be quicker than tcp."""
    return (one.boot, one.network) != (other.boot, other.network)


def stays_here(host: str) -> bool:
    """Whether nobody outside this machine, or network namespace, reaches what listens on ``host``."""
    return host in ("localhost", "::1") or host.startswith("127.")


def expected(one: Whereabouts, other: Whereabouts, *, rdma: bool = False) -> Route:
    """What ``auto`` will take between two processes, unless trying it shows something else.

    ``rdma``: both have a port that is active.
    """
    obstacle = why_not_shm(one, other)
    if obstacle is None:
        return Route("shm", "one machine, one network namespace, one user")
    if rdma and apart(one, other):
        return Route("verbs", f"{obstacle}; if a first write arrives within {PROBE_SECONDS:g} s, tcp else")
    return Route("tcp", obstacle)


def connect(
    devices: Mapping[str, Device],
    here: Whereabouts,
    card: Card,
    *,
    agree: Agree = str,
    no_verbs: str = "no active RDMA port here",
) -> tuple[Channel, Route]:
    """A channel over the best of our ``devices`` that reaches the member with that card.

    shm where a region of it really could be mapped; verbs over a network where a first write really arrived; else tcp.
    ``agree`` is asked about verbs, because both sides must take the same. ``no_verbs``: why our ``devices`` lack it.
    Raises `PeerLost` with the reasons.
    """
    reasons = []
    if "shm" in devices and card.shm is not None and card.probe is not None:
        obstacle = why_not_shm(here, card.where)
        if obstacle is None:
            try:
                return _by_mapping(devices["shm"], card.shm, card.probe), Route("shm", "its memory could be mapped")
            except (PeerLost, RemoteAccessError, AuthenticationError) as error:
                obstacle = str(error).removeprefix("shm: ")
        reasons.append(f"not shm: {obstacle}")
    if "tcp" in devices and card.tcp is not None:
        if reasons and apart(here, card.where):
            channel, obstacle = _by_probe(devices.get("verbs"), card, agree, no_verbs)
            if channel is not None:
                return channel, Route("verbs", f"{'; '.join(reasons)}; a first write arrived")
            reasons.append(f"not verbs: {obstacle}")
        return devices["tcp"].connect(card.tcp), Route("tcp", "; ".join(reasons) or TOLD)
    if "verbs" in devices and card.verbs is not None:
        return devices["verbs"].connect(card.verbs), Route("verbs", TOLD)
    raise PeerLost("; ".join(reasons) or "no device in common")


def _by_mapping(device: Device, address: bytes, probe: bytes) -> Channel:
    channel = device.connect(address)
    try:
        channel.map(RemoteRegion.unpack(probe).view())  # only a real mapping counts
    except BaseException:
        channel.close()
        raise
    return channel


def _by_probe(device: Device | None, card: Card, agree: Agree, no_verbs: str) -> tuple[Channel | None, str]:
    """A channel over verbs if both sides are to use it, else why not. Both sides come here, or neither asks."""
    if device is None:
        return None, no_verbs
    if card.verbs is None or card.verbs_probe is None:
        return None, "no active RDMA port there"
    channel, found = None, ""
    try:
        channel = _written(device, card.verbs, card.verbs_probe)
    except (DeviceError, AuthenticationError, OutOfMemory) as error:
        found = str(error).removeprefix("verbs: ")
    verdict = agree(found)
    if channel is not None and verdict:
        channel.close()
        return None, verdict
    if channel is None and not verdict:
        raise PeerLost(f"verbs: the other side reached us, and we cannot reach it (--device tcp helps): {found}")
    return channel, verdict


def _written(device: Device, address: bytes, probe: bytes) -> Channel:
    channel = device.connect(address, PROBE_SECONDS)
    try:
        with device.allocate(8) as source:
            channel.write(source.view(), RemoteRegion.unpack(probe).view()).wait(PROBE_SECONDS)
    except BaseException:
        channel.close()
        raise
    return channel
