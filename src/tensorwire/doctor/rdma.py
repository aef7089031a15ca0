"""RDMA: libibverbs, ports, their GIDs, and the ones that a job would take, with reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tensorwire.device.verbs.library import DEVICES, load
from tensorwire.device.verbs.port_selection import GID_INDEX, PORT, select_port
from tensorwire.device.verbs.ports import Port, Query, query, scan_ports
from tensorwire.doctor.findings import Finding, Level, Section
from tensorwire.errors import ArgumentError, VerbsUnavailable
from tensorwire.launch.place import device_choice, listening_interface
from tensorwire.sizes import size_text


def severity(environment: Mapping[str, str], device: str = "verbs") -> Level:
    """What it means if a device does not work that ``auto`` can do without.

    A job stops only where ``TENSORWIRE_DEVICE`` wants nothing else.
    """
    return "stops" if device_choice(environment) == device else "note"


def verbs(environment: Mapping[str, str], root: Path = DEVICES, ask: Query = query) -> Section | None:
    """All about RDMA; None where there is none, and nobody has asked for it."""
    ports = scan_ports(root, ask)
    asked = environment.get(PORT) or environment.get(GID_INDEX) or severity(environment) == "stops"
    if not ports and not asked:
        return None
    found = (
        _library(environment),
        *(finding for port in ports for finding in _port(port)),
        _choice(ports, environment),
    )
    return Section("verbs", found)


def _library(environment: Mapping[str, str]) -> Finding:
    try:
        return Finding("library", f"libibverbs is here (ibverbs {load().__version__})")
    except VerbsUnavailable as error:
        return Finding("library", "no", severity(environment), str(error))


def _port(port: Port) -> Iterator[Finding]:
    words = [port.state, port.link_layer, port.rate]
    if port.mtu:
        words += [f"MTU {port.mtu}", f"messages of up to {size_text(port.max_message)}"]
    if port.lid:
        words.append(f"LID {port.lid}")
    trouble = "" if port.trouble == f"{port.name} is {port.state}" else port.trouble
    yield Finding(port.name, ", ".join(filter(None, words)), "note" if port.trouble else "fine", trouble)
    for gid in port.gids:
        words = [gid.kind, str(gid.address), gid.interface]
        yield Finding(f"{port.name} GID {gid.index}", ", ".join(filter(None, words)))


def _choice(ports: list[Port], environment: Mapping[str, str]) -> Finding:
    try:
        near = listening_interface(None, environment)
    except ArgumentError:  # the settings say so
        near = None
    try:
        return Finding("picked", select_port(ports, environment=environment, near=near).why)
    except VerbsUnavailable as error:
        return Finding("picked", "none", severity(environment), str(error))
    except ArgumentError as error:
        return Finding("picked", "none", "stops", str(error))
