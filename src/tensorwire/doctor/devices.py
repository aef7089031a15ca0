"""Devices, each opened and tried, and the device that two processes would get."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from tensorwire.control.address import split_address
from tensorwire.control.locality import Locality, locality, why_not_shm
from tensorwire.control.reach import CANDIDATES, expected
from tensorwire.device import Device, device_names, find_device
from tensorwire.device.registry import BUILT_IN
from tensorwire.device.verbs.ports import has_active_port
from tensorwire.doctor.findings import Finding, Level, Section
from tensorwire.doctor.rdma import severity

_SECONDS = 10.0
_ADVICE = {
    "loopback": "see memory above",
    "shm": "run with --device tcp, or see memory, sockets and kernel above",
    "tcp": "see sockets above; a firewall on loopback?",
    "verbs": "see verbs and memory above",
}


def devices(environment: Mapping[str, str]) -> Section:
    """Each device that is installed: two of them opened, a write and its signal seen, and read back."""
    return Section("devices", tuple(_examine(name, environment) for name in device_names()))


def _examine(name: str, environment: Mapping[str, str]) -> Finding:
    """A device that ``auto`` needs, or that the settings name, stops a job where it does not work."""
    candidate = CANDIDATES.get(name)
    needed = name in BUILT_IN and not (candidate is not None and candidate.agreed)
    trouble: Level = "stops" if needed else severity(environment, name)
    if name == "verbs" and not has_active_port():
        advice = "shm and tcp do all that it would, slower over a network" if trouble == "note" else "see verbs above"
        return Finding(name, "no active RDMA port here", trouble, advice)
    return _try_device(name, trouble)


def _try_device(name: str, trouble: Level) -> Finding:
    try:
        kind = find_device(name)
        with kind() as one, kind() as other:
            _probe(one, other)
    except Exception as error:  # whatever the code of an installed package raises
        advice = _ADVICE.get(name, "ask the package that it belongs to")
        return Finding(name, f"does not work: {error}", trouble, advice)
    return Finding(name, "works: a write and its signal arrived, and were read back")


def _probe(one: Device, other: Device) -> None:
    content = b"tensorwire doctor" * 64
    target, source, back = other.allocate(8 + len(content)), one.allocate(len(content)), one.allocate(len(content))
    memoryview(source)[:] = content
    with one.connect(other.address, _SECONDS) as channel:
        remote = target.remote()
        payload = remote.view(8)
        channel.write(source.view(), payload, (remote.view(0, 8), 1)).wait(_SECONDS)
        target.wait(0, 1, _SECONDS)
        channel.read(back.view(), payload).wait(_SECONDS)
        if bytes(memoryview(target)[8:]) != content or bytes(memoryview(back)) != content:
            raise OSError("other bytes arrived than were written: test this machine's memory")


def between(one: int | None = None, other: int | None = None) -> Section:
    """Which device two processes get, by what ``auto`` decides; without numbers, two of this user here."""
    first, second = locality(one), locality(other)
    route = expected(first, second, {} if has_active_port() else {"verbs": "no active RDMA port here"})
    who = "two processes of this user here" if one is None and other is None else f"processes {one} and {other}"
    findings = [Finding(f"process {pid}", _at(where)) for pid, where in ((one, first), (other, second)) if pid]
    obstacle = why_not_shm(first, second)
    findings.append(Finding("shared memory", f"no: {obstacle}" if obstacle else "nothing is in the way"))
    advice = ""
    if first.network != second.network:
        advice = "it needs an address that both reach: set TENSORWIRE_IFACE, and try --peer HOST:PORT there"
    findings.append(Finding("auto takes", str(route), "note" if obstacle else "fine", advice))
    return Section(who, tuple(findings))


def _at(where: Locality) -> str:
    return f"user {where.user}, network namespace {where.network}"


def peer(address: str) -> Section:
    """Whether a process listens at ``HOST:PORT``, and by which interface this machine reaches it."""
    host, port = split_address(address)
    start = time.monotonic()
    try:
        with socket.create_connection((host, port), _SECONDS) as sock:
            took = (time.monotonic() - start) * 1e6
            found = Finding("connection", f"from {sock.getsockname()[0]}, in {took:.0f} us (network and name service)")
    except OSError as error:
        advice = "does anything listen there, and does a firewall let it through?"
        found = Finding("connection", f"no: {error}", "stops", advice)
    return Section(f"peer {address}", (found,))
