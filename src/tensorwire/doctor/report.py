"""The doctor's whole report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

from tensorwire.control.settings import failure_times
from tensorwire.device.copy_choice import described, measure_copy
from tensorwire.device.registry import AUTO, find_job_device
from tensorwire.doctor.accelerators import accelerators
from tensorwire.doctor.devices import between, devices, peer
from tensorwire.doctor.findings import Finding, Section
from tensorwire.doctor.memory_limits import memory
from tensorwire.doctor.rdma import verbs
from tensorwire.doctor.software import software
from tensorwire.doctor.system import interfaces, kernel, sockets
from tensorwire.errors import ArgumentError
from tensorwire.launch.place import device_choice, grace_seconds, listening_interface
from tensorwire.launch.secret import file_secret
from tensorwire.progress import Report


def examine(
    *, pids: tuple[int, int] | None = None, address: str | None = None, report: Report = lambda doing: None
) -> list[Section]:
    """Looks at everything; opens devices, starts nothing that stays.

    Args:
        pids: Two processes; the report names the device that they would get.
        address: ``HOST:PORT``, to which a connection is tried.
        report: Called with what is examined from now on.

    Raises:
        ArgumentError: Processes or an address that cannot be asked about.
    """
    pair = between(*pids) if pids is not None else between()
    sections = [memory(), kernel(), sockets(), interfaces(), software()]
    report("looking for accelerators")
    sections += [accelerators(), settings(os.environ)]
    report("looking for RDMA")
    if (rdma := verbs(os.environ)) is not None:
        sections.append(rdma)
    report("opening each device")
    sections += [devices(os.environ), pair]
    if address is not None:
        report(f"connecting to {address}")
        sections.append(peer(address))
    return sections


def settings(environment: Mapping[str, str]) -> Section:
    """The environment variables that a job would read."""
    return Section("settings", tuple(_settings(environment)))


def _settings(environment: Mapping[str, str]) -> Iterator[Finding]:
    def device() -> str:
        if (chosen := device_choice(environment)) != AUTO:
            find_job_device(chosen)
        return chosen

    def failures() -> str:
        beat, leaves, silence = failure_times(environment)
        return (
            f"a sign of life every {beat:g} s; a process leaves after {leaves:g} s without the coordinator, is lost "
            f"after {silence:g} s of silence, and has {grace_seconds(environment):g} s to leave a failed job"
        )

    def secret() -> str:
        if not environment.get("TENSORWIRE_SECRET_FILE"):
            return "not set (needed for jobs on several machines)"
        file_secret(environment)
        return "a file that this user alone can read"

    def copies() -> str:
        measure_copy()
        return described()

    yield _setting("TENSORWIRE_DEVICE", device)
    yield _setting(
        "TENSORWIRE_IFACE", lambda: f"tcp listens on {listening_interface(None, environment)} unless a job says else"
    )
    yield _setting("TENSORWIRE_SECRET_FILE", secret)
    yield _setting("failure timeout", failures)
    yield _setting("copies", copies)


def _setting(name: str, read: Callable[[], str]) -> Finding:
    try:
        return Finding(name, read())
    except ArgumentError as error:
        return Finding(name, "wrong", "stops", " ".join(str(error).split()))
