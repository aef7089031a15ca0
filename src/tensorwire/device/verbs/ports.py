"""The RDMA ports and GIDs of this machine.

A GID is the address by which peers reach a port. Almost all is read from sysfs, which costs little and needs no
library; only the MTU and the largest message are known to libibverbs alone.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tensorwire.device.verbs.library import DEVICES, open_device
from tensorwire.errors import VerbsUnavailable

INFINIBAND, ROCE_1, ROCE_2 = "InfiniBand", "RoCE v1", "RoCE v2"
ACTIVE = "ACTIVE"

Limits = Callable[[str, int], tuple[int, int]]


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
    """One port of an RDMA device. ``mtu`` and ``max_message`` are bytes, and 0 where the port cannot be used.

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


def query(device: str, number: int) -> tuple[int, int]:
    """The active MTU and the largest message of a port, in bytes, by libibverbs. Raises `VerbsUnavailable`."""
    context = open_device(device)
    try:
        port = context.query_port(number)
        return 128 << int(port.active_mtu), int(port.max_msg_sz)
    except OSError as error:
        raise VerbsUnavailable(f"{device}:{number} does not say what it can: {error}") from None
    finally:
        context.close()


def look(root: Path = DEVICES, limits: Limits = query) -> list[Port]:
    """All ports of this machine, by name. Raises nothing: what is wrong with a port is its ``trouble``.

    ``limits`` tells MTU and largest message of a port that is active.
    """
    ports = []
    for path in _port_paths(root):
        port = _read_port(path)
        if port.works:
            try:
                mtu, max_message = limits(port.device, port.number)
                port = replace(port, mtu=mtu, max_message=max_message)
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
    gids = tuple(_gids(path, layer == INFINIBAND))
    fault, rate = _foreign(device), _text(path / "rate")
    return Port(device.name, int(path.name), _state(path), layer, 0, lid, 0, gids, fault, rate)


def _state(path: Path) -> str:
    return _text(path / "state").partition(": ")[2] or "unknown"  # 4: ACTIVE


def _foreign(device: Path) -> str:
    """What keeps a device from having the queue pairs that we use: only channel adapters write with immediate data."""
    kind = _text(device / "node_type").partition(": ")[2]
    return "" if kind == "CA" else f"{device.name} has no reliable connections with immediate data (its kind is {kind})"


def _gids(path: Path, infiniband: bool) -> Iterator[Gid]:
    interface = _ip_over_infiniband(path) if infiniband else ""
    for index in sorted(int(entry.name) for entry in (path / "gids").glob("*")):
        raw = bytes.fromhex(_text(path / f"gids/{index}").replace(":", ""))
        if len(raw) != 16 or not any(raw[8:]):  # an empty place in the table
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
        fd = os.open(path, os.O_RDONLY)  # a table of GIDs has a thousand files, and Path.read_text many system calls
    except OSError:
        return ""
    try:
        return os.read(fd, 4096).decode().strip()
    except OSError:  # an empty place in a table
        return ""
    finally:
        os.close(fd)
