"""The choice of an RDMA port and GID, with its reason."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensorwire.device.interfaces import interface_address
from tensorwire.device.verbs.library import DEVICES
from tensorwire.device.verbs.ports import ACTIVE, INFINIBAND, Gid, Port
from tensorwire.errors import ArgumentError, VerbsUnavailable

PORT, GID_INDEX = "TENSORWIRE_VERBS_PORT", "TENSORWIRE_VERBS_GID_INDEX"
_NO_DEVICE = (
    f"no RDMA device here ({DEVICES} lists none): load the driver of the NIC (such as modprobe mlx5_ib); without a "
    "NIC, Soft-RoCE does it in software (modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0)"
)


@dataclass(frozen=True)
class PortChoice:
    """The port and GID to take. ``why``: one sentence for people."""

    port: Port
    gid: Gid
    why: str


def select_port(
    ports: Sequence[Port],
    port: str | None = None,
    gid_index: int | None = None,
    environment: Mapping[str, str] = os.environ,
    near: str | None = None,
) -> PortChoice:
    """The port and GID to take, by what was asked for, what the environment says, and what can be routed.

    ``port`` (``mlx5_0`` or ``mlx5_0:1``) and ``gid_index`` win over ``TENSORWIRE_VERBS_PORT`` and
    ``TENSORWIRE_VERBS_GID_INDEX``; these over the hints ``NCCL_IB_HCA`` and ``NCCL_IB_GID_INDEX``. ``near``: an IP
    address of this machine; the port it belongs to is preferred. RoCE v1 is taken only if its index was given.

    Raises `ArgumentError` for what names nothing here (a hint may), `VerbsUnavailable` if no port can be used.
    """
    if not ports:
        raise VerbsUnavailable(_NO_DEVICE)
    named, port_why = _named(ports, port, environment)
    index, index_why = _index(gid_index, environment)
    usable = _usable(named, index, index_why)
    notes: list[str] = []
    if not port_why:
        usable, port_why = _hinted(usable, environment.get("NCCL_IB_HCA", ""), notes)
    place = _Place.of(near)
    chosen = min(usable, key=lambda p: min(map(place.distance, p.gids)))
    port_why = port_why or place.why(chosen, usable)
    gid, gid_why = _gid(chosen, index, index_why, environment, place, notes)
    return PortChoice(chosen, gid, "; ".join([f"{chosen.name}: {port_why}", f"{gid}: {gid_why}", *notes]))


def _named(ports: Sequence[Port], port: str | None, environment: Mapping[str, str]) -> tuple[Sequence[Port], str]:
    """The ports that a setting names, and that setting."""
    who, wanted = ("port", port) if port else (PORT, environment.get(PORT, ""))
    if not wanted:
        return ports, ""
    device, _, number = wanted.partition(":")
    if not device or (":" in wanted and not number.isdecimal()):
        raise ArgumentError(f"{who} must be a device or one of its ports, such as mlx5_0 or mlx5_0:1, not {wanted!r}")
    named = [p for p in ports if p.device == device and number in ("", str(p.number))]
    if not named:
        raise ArgumentError(f"{who} {wanted} is not here: there is {', '.join(p.name for p in ports)}")
    return named, f"asked for by {who}"


def _usable(ports: Sequence[Port], index: int | None, index_why: str) -> list[Port]:
    working = [p for p in ports if p.works]
    usable = [p for p in working if (not p.trouble if index is None else p.gid(index) is not None)]
    if working and not usable and index is not None:
        there = "; ".join(f"{p.name} has {', '.join(map(str, p.gids)) or 'none'}" for p in working)
        raise ArgumentError(f"{index_why} {index} names no GID: {there}")
    if not usable:
        raise VerbsUnavailable(f"no usable RDMA port: {'; '.join(p.trouble for p in ports)}. {_advice(ports)}")
    return usable


def _index(gid_index: int | None, environment: Mapping[str, str]) -> tuple[int | None, str]:
    if gid_index is not None:
        return gid_index, "gid_index"
    text = environment.get(GID_INDEX, "")
    if text and not text.isdecimal():
        raise ArgumentError(f"{GID_INDEX} is the number of a GID, from 0, not {text!r}")
    return (int(text) if text else None), GID_INDEX


def _hinted(usable: list[Port], hint: str, notes: list[str]) -> tuple[list[Port], str]:
    """The ports that ``NCCL_IB_HCA`` leaves, in its own syntax: ``^`` excludes, ``=`` wants whole names."""
    if not hint:
        return usable, ""
    exclude, names = hint.startswith("^"), hint.removeprefix("^")
    exact, names = names.startswith("="), names.removeprefix("=")

    def matches(port: Port, item: str) -> bool:
        device, _, number = item.partition(":")
        same = port.device == device if exact else port.device.startswith(device)
        return same and number in ("", str(port.number))

    items = [item.strip() for item in names.split(",") if item.strip()]
    left = [p for p in usable if any(matches(p, item) for item in items) != exclude]
    if not left:
        notes.append(f"NCCL_IB_HCA={hint} leaves no usable port, and was not followed")
        return usable, ""
    return left, "" if len(left) > 1 else f"left by NCCL_IB_HCA={hint}" if len(usable) > 1 else ""


def _gid(
    port: Port, index: int | None, index_why: str, environment: Mapping[str, str], place: _Place, notes: list[str]
) -> tuple[Gid, str]:
    if index is not None and (asked := port.gid(index)) is not None:
        return asked, f"asked for by {index_why}"
    hint = environment.get("NCCL_IB_GID_INDEX", "")
    if hint.isdecimal() and (hinted := port.gid(int(hint))) is not None:
        return hinted, f"NCCL_IB_GID_INDEX={hint}"
    if hint and hint != "-1":  # -1: the library is to choose
        notes.append(f"NCCL_IB_GID_INDEX={hint} is not a GID there, and was not followed")
    routable = [gid for gid in port.gids if gid.routable]
    best = min(routable, key=lambda gid: (place.distance(gid), _rank(gid), gid.index))
    return best, "the address that this process listens on" if place.distance(best) == 0 else _RANKS[_rank(best)]


_RANKS = ("with an IPv4 address", "with an IPv6 address", "link-local, there is nothing better", "the port's own")


def _rank(gid: Gid) -> int:
    if gid.kind == INFINIBAND:
        return 3
    return 0 if gid.address.version == 4 else 2 if gid.address.is_link_local else 1


def _advice(ports: Iterable[Port]) -> str:
    states = {port.state for port in ports}
    if ACTIVE not in states and states & {"INIT", "ARMED"}:
        return "InfiniBand needs a subnet manager: start opensm on one machine"
    if ACTIVE not in states:
        return "Look at the cable and the switch; set its network interface up (ip link set eth0 up)"
    if any(port.trouble.endswith("no routable GID") for port in ports):
        return "RoCE v2 needs an IP address on the port's network interface (ip addr add 10.0.0.1/24 dev eth0)"
    return "tensorwire doctor shows all ports"


# ---- nearness


@dataclass(frozen=True)
class _Place:
    """An address of this machine and the interface that has it; both empty if there is none."""

    address: str
    interface: str

    @classmethod
    def of(cls, near: str | None) -> _Place:
        try:
            address = str(ipaddress.ip_address(near or ""))
        except ValueError:
            return cls("", "")
        return cls(address, next((name for name in _interfaces() if interface_address(name) == address), ""))

    def distance(self, gid: Gid) -> int:
        """0: it is this address; 1: it is on the same interface."""
        if gid.kind != INFINIBAND and str(gid.address) == self.address:
            return 0
        return 1 if self.interface and gid.interface == self.interface else 2

    def why(self, port: Port, usable: Sequence[Port]) -> str:
        """Why ``port``, the nearest, was taken."""
        if len(usable) == 1:
            return "the only usable port"
        if min(map(self.distance, port.gids)) < 2:
            return f"the one at {self.address}"
        return f"the first of {len(usable)} usable ports"


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]
