"""The RDMA ports and GIDs of this machine.

A GID is the address by which peers reach a port. Ports are read from sysfs, which needs no library. GIDs are there,
too, but in a file each, and tables have a thousand places: libibverbs is quicker.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensorwire.device.verbs.library import DEVICES, open_device
from tensorwire.errors import VerbsUnavailable

INFINIBAND, ROCE_1, ROCE_2 = "InfiniBand", "RoCE v1", "RoCE v2"
ACTIVE = "ACTIVE"


@dataclass(frozen=True)
class PortAttributes:
    """What libibverbs alone knows of a port: bytes, and the table of GIDs with its empty places."""

    mtu: int
    max_message: int
    gids: Sequence[bytes]


Query = Callable[[str, int], PortAttributes]


@dataclass(frozen=True)
class Gid:
    """An address of a port: 16 bytes, how they travel (``kind``), and the network interface they belong to, or ''."""

    index: int
    raw: bytes
    kind: str
    interface: str

    @property
    def routable(self) -> bool:
        """Whether peers are reached by it: RoCE v1 does not leave its segment, and is taken only by its index."""
        return self.kind in (ROCE_2, INFINIBAND)

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The GID as the IP address that it is; on InfiniBand it only looks like one."""
        whole = ipaddress.IPv6Address(self.raw)
        return whole.ipv4_mapped or whole

    def __str__(self) -> str:
        return f"GID {self.index} ({', '.join(filter(None, (self.kind, str(self.address), self.interface)))})"


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device. ``mtu`` and ``max_message`` are bytes; 0, and without GIDs, where it cannot be used.

    ``fault`` says why it cannot although it is active; ``rate`` is in the kernel's words.
    """

    device: str
    number: int
    state: str
    link_layer: str
    mtu: int
    lid: int
    max_message: int
    gids: tuple[Gid, ...]
    fault: str = ""
    rate: str = ""

    @property
    def name(self) -> str:
        """``mlx5_0:1``."""
        return f"{self.device}:{self.number}"

    def gid(self, index: int) -> Gid | None:
        """The GID with that number, if there is one."""
        return next((gid for gid in self.gids if gid.index == index), None)

    @property
    def works(self) -> bool:
        """Whether it is up and ours to use; whether peers can reach it is another question."""
        return self.state == ACTIVE and not self.fault

    @property
    def trouble(self) -> str:
        """What keeps it from being used; '' for nothing."""
        if self.state != ACTIVE:
            return f"{self.name} is {self.state}"
        if self.fault:
            return self.fault
        return "" if any(gid.routable for gid in self.gids) else f"{self.name} has no routable GID"


def has_active_port(root: Path = DEVICES) -> bool:
    """Whether it is worth while to load libibverbs: a few small files are read."""
    return any(_state(path) == ACTIVE and not _foreign(path.parent.parent) for path in _port_paths(root))


def query(device: str, number: int) -> PortAttributes:
    """Asks libibverbs. Raises `VerbsUnavailable`."""
    context = open_device(device)
    try:
        port = context.query_port(number)
        gids = [_raw(context, number, index) for index in range(port.gid_tbl_len)]
        return PortAttributes(128 << int(port.active_mtu), int(port.max_msg_sz), gids)
    except OSError as error:
        raise VerbsUnavailable(f"{device}:{number} does not report its capabilities: {error}") from None
    finally:
        context.close()


def _raw(context: Any, number: int, index: int) -> bytes:
    try:
        return bytes(context.query_gid(number, index).raw)
    except OSError:  # how some drivers say that the place is empty
        return bytes(16)


def scan_ports(root: Path = DEVICES, ask: Query = query) -> list[Port]:
    """All ports of this machine, by name. Raises nothing: what is wrong with a port is its ``trouble``.

    ``ask`` is called for ports that are active; for the rest, MTU, largest message and GIDs stay unknown.
    """
    ports = []
    for path in _port_paths(root):
        port = _read_port(path)
        if port.works:
            try:
                port = _completed(port, path, ask(port.device, port.number))
            except VerbsUnavailable as error:
                port = replace(port, fault=str(error))
        ports.append(port)
    return ports


def _port_paths(root: Path) -> list[Path]:
    def by_number(path: Path) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]

    return sorted(root.glob("*/ports/*"), key=by_number)


def _read_port(path: Path) -> Port:
    device = path.parent.parent
    layer, lid = _text(path / "link_layer"), int(_text(path / "lid") or "0", 16)
    return Port(device.name, int(path.name), _state(path), layer, 0, lid, 0, (), _foreign(device), _text(path / "rate"))


def _completed(port: Port, path: Path, answer: PortAttributes) -> Port:
    gids = tuple(_gids(path, answer.gids, port.link_layer == INFINIBAND))
    return replace(port, mtu=answer.mtu, max_message=answer.max_message, gids=gids)


def _state(path: Path) -> str:
    return _text(path / "state").partition(": ")[2] or "unknown"  # 4: ACTIVE


def _foreign(device: Path) -> str:
    """What keeps a device from having the queue pairs that we use: only channel adapters write with immediate data."""
    kind = _text(device / "node_type").partition(": ")[2]
    return "" if kind == "CA" else f"{device.name} has no reliable connections with immediate data (its kind is {kind})"


def _gids(path: Path, table: Sequence[bytes], infiniband: bool) -> Iterator[Gid]:
    interface = _ip_over_infiniband(path) if infiniband else ""
    for index, raw in enumerate(table):
        if not any(raw[8:]):  # an empty place
            continue
        if infiniband:
            yield Gid(index, raw, INFINIBAND, interface)
        else:
            kind = ROCE_2 if _text(path / f"gid_attrs/types/{index}") == ROCE_2 else ROCE_1
            yield Gid(index, raw, kind, _text(path / f"gid_attrs/ndevs/{index}"))


def _ip_over_infiniband(path: Path) -> str:
    """The network interface on a port of InfiniBand, whose GIDs do not name it."""
    for interface in sorted((path.parent.parent / "device/net").glob("*")):
        if _text(interface / "dev_port") == str(int(path.name) - 1):
            return interface.name
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not there, or removed meanwhile
        return ""
