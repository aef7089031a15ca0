"""Which device reaches a peer, and why: the choice of ``auto``, which ``tensorwire doctor`` explains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from tensorwire.control.locality import Locality, apart, stays_here, why_not_shm
from tensorwire.device import Channel, Device, RemoteRegion
from tensorwire.device.verbs.ports import has_active_port
from tensorwire.errors import AuthenticationError, DeviceError, OutOfMemory, PeerLost

PROBE_SECONDS = 2.0  # in which verbs has to connect, and then to write, to be taken
NAMED = "the device that both sides were told to use"
NONE_ABSENT: Mapping[str, str] = MappingProxyType({})
# From a device's name and what this side found about it ('': it works, else why not) to what counts for both sides.
Agree = Callable[[str, str], str]


class Endpoint(msgspec.Struct, frozen=True):
    """How others reach one device of a process."""

    address: bytes
    probe: bytes = b""  # 8 bytes that anybody in the job may write, where the device is tried before it is taken


class Card(msgspec.Struct, frozen=True):
    """A member's entry in the address book."""

    where: Locality
    devices: dict[str, Endpoint]  # by name
    absent: dict[str, str] = {}  # devices that `auto` would have opened, and why it could not
    frameworks: tuple[str, ...] = ()  # that its process has loaded: servers load them meanwhile
    interface: str = ""  # the address on which it listens


@dataclass(frozen=True)
class Route:
    """The device by which a peer is reached, and why this one."""

    device: str
    why: str

    def __str__(self) -> str:
        return f"{self.device}: {self.why}"


# ---- what auto tries


def _never(*_: object) -> None:
    return None


def _connected(device: Device, there: Endpoint) -> Channel:
    return device.connect(there.address)


def _mapped(device: Device, there: Endpoint) -> Channel:
    channel = device.connect(there.address)
    try:
        channel.map(RemoteRegion.unpack(there.probe).view())  # only a real mapping counts
    except BaseException:
        channel.close()
        raise
    return channel


def _written(device: Device, there: Endpoint) -> Channel:
    channel = device.connect(there.address, PROBE_SECONDS)
    try:
        with device.allocate(8) as source:
            channel.write(source.view(), RemoteRegion.unpack(there.probe).view()).wait(PROBE_SECONDS)
    except BaseException:
        channel.close()
        raise
    return channel


def _why_no_verbs(interface: str) -> str | None:
    """Looks at what costs nothing; the library is not loaded where it can be of no use."""
    if stays_here(interface):
        return f"nobody on another machine reaches {interface}"
    return None if has_active_port() else "no active RDMA port"


@dataclass(frozen=True)
class Candidate:
    """A device that ``auto`` may take.

    Attributes:
        device: Its name.
        outlook: What is known in its favour before anything was tried, in words.
        proof: What showed that it works, in words.
        connect: Connects, and tries it.
        why_not: What keeps two processes from using it, as far as is known without trying.
        why_not_open: What keeps a process that listens on an interface from opening it at all.
        probed: Whether ``connect`` needs memory to try it on.
        agreed: Whether both ends decide together, and a process that cannot open it goes on without.
    """

    device: str
    outlook: str = ""
    proof: str = ""
    connect: Callable[[Device, Endpoint], Channel] = _connected
    why_not: Callable[[Locality, Locality], str | None] = _never
    why_not_open: Callable[[str], str | None] = _never
    probed: bool = False
    agreed: bool = False


_SHM = Candidate(
    "shm",
    outlook="one machine, one network namespace, one user",
    proof="its memory could be mapped",
    connect=_mapped,
    why_not=why_not_shm,
    probed=True,
)
_VERBS = Candidate(
    "verbs",
    outlook=f"if a first write arrives within {PROBE_SECONDS:g} s, else tcp",
    proof="a first write arrived",
    connect=_written,
    why_not_open=_why_no_verbs,
    probed=True,
    agreed=True,
)
_TCP = Candidate("tcp")
CANDIDATES = {candidate.device: candidate for candidate in (_SHM, _VERBS, _TCP)}


def candidates(one: Locality, other: Locality) -> tuple[Candidate, ...]:
    """What ``auto`` tries between two processes, the best first: verbs only where a network lies between them."""
    return (_SHM, _VERBS, _TCP) if apart(one, other) else (_SHM, _TCP)


def not_opened(interface: str) -> dict[str, str]:
    """The devices that ``auto`` does not open in a process that listens on ``interface``, and why."""
    reasons = {name: candidate.why_not_open(interface) for name, candidate in CANDIDATES.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def expected(one: Locality, other: Locality, absent: Mapping[str, str] = NONE_ABSENT) -> Route:
    """What ``auto`` will take between two processes, unless trying it shows something else.

    Args:
        one: Where the one process is.
        other: Where the other one is.
        absent: The devices that they do not have, and why.
    """
    reasons: list[str] = []
    for candidate in candidates(one, other):
        obstacle = absent.get(candidate.device) or candidate.why_not(one, other)
        if obstacle is None:
            return Route(candidate.device, _in_words(reasons, candidate.outlook))
        reasons.append(f"not {candidate.device}: {obstacle}")
    raise PeerLost("; ".join(reasons))


# ---- a channel


def endpoint(device: Device) -> Endpoint:
    """How others reach ``device``, for a card."""
    candidate = CANDIDATES.get(device.name)
    if candidate is None or not candidate.probed:
        return Endpoint(device.address)
    return Endpoint(device.address, device.allocate(8).remote("write").pack())


def connect(
    devices: Mapping[str, Device],
    here: Locality,
    card: Card,
    *,
    agree: Agree = lambda device, found: found,
    absent: Mapping[str, str] = NONE_ABSENT,
) -> tuple[Channel, Route]:
    """A channel over the best of our ``devices`` that reaches the process with that card.

    Args:
        devices: This process's devices, by name.
        here: Where this process is.
        card: The other process's entry in the address book.
        agree: Is asked about a device that both ends take, or neither.
        absent: The devices that ``auto`` would have opened here and could not, and why.

    Raises:
        PeerLost: If no device reaches it; says what kept each from it.
    """
    common = [name for name in devices if name in card.devices]
    if not common:
        raise PeerLost(f"no device in common: {', '.join(devices)} here, {', '.join(card.devices)} there")
    if len(common) == 1:
        return _as_named(common[0], devices[common[0]], here, card)
    reasons: list[str] = []
    for candidate in candidates(here, card.where):
        name = candidate.device
        if name in common:
            channel, obstacle = _try(candidate, devices[name], here, card, agree)
            if channel is not None:
                return channel, Route(name, _in_words(reasons, candidate.proof))
        elif name in absent:
            obstacle = absent[name]
        elif name in card.absent:
            obstacle = f"{card.absent[name]} (at the other end)"
        else:  # the settings of one end exclude it
            continue
        reasons.append(f"not {name}: {obstacle}")
    raise PeerLost("; ".join(reasons))


def _in_words(reasons: Sequence[str], favour: str) -> str:
    return "; ".join(filter(None, (*reasons, favour)))


def _as_named(name: str, device: Device, here: Locality, card: Card) -> tuple[Channel, Route]:
    candidate = CANDIDATES.get(name)
    if candidate is not None and (obstacle := candidate.why_not(here, card.where)) is not None:
        raise PeerLost(f"not {name}: {obstacle}")
    return device.connect(card.devices[name].address), Route(name, NAMED)


def _try(candidate: Candidate, device: Device, here: Locality, card: Card, agree: Agree) -> tuple[Channel | None, str]:
    """A channel, or why there is none. Where both ends agree on a device, both come here, or neither."""
    if (obstacle := candidate.why_not(here, card.where)) is not None:
        return None, obstacle
    name, channel, found = candidate.device, None, ""
    try:
        channel = candidate.connect(device, card.devices[name])
    except (DeviceError, AuthenticationError) as error:
        found = str(error).removeprefix(f"{name}: ")
    except OutOfMemory as error:
        if not candidate.agreed:  # the other end would still take it
            raise
        found = str(error).removeprefix(f"{name}: ")
    verdict = agree(name, found) if candidate.agreed else found
    if channel is not None and verdict:
        channel.close()
        return None, verdict
    if channel is None and not verdict:
        raise PeerLost(f"{name}: the other side reached us, and we cannot reach it (--device tcp helps): {found}")
    return channel, verdict
