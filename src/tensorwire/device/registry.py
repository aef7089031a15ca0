"""Devices by name: built-in ones, and those of installed packages.

A package adds a device with an entry point of the group ``tensorwire.devices``, which has the device's name and leads
to its class. The package is imported only when its device is requested.
"""

from __future__ import annotations

import inspect
from importlib.metadata import EntryPoint, entry_points

from tensorwire.device.contract import Device
from tensorwire.device.loopback import LoopbackDevice
from tensorwire.device.region import check_name
from tensorwire.device.shm import ShmDevice
from tensorwire.device.tcp import TcpDevice
from tensorwire.device.verbs import VerbsDevice
from tensorwire.errors import ArgumentError

GROUP = "tensorwire.devices"
AUTO = "auto"  # instead of a name: each pair of processes takes the best device
BUILT_IN: dict[str, type[Device]] = {kind.name: kind for kind in (LoopbackDevice, ShmDevice, TcpDevice, VerbsDevice)}
# Those that a job can use.
BUILT_IN_FOR_JOBS = tuple(name for name, kind in BUILT_IN.items() if kind.capabilities.other_processes)


def device_names() -> list[str]:
    """Lists the devices that `find_device` knows.

    Returns:
        Their names: Tensorwire's own first, then those of installed packages.
    """
    return [*BUILT_IN, *sorted({entry.name for entry in entry_points(group=GROUP)} - {*BUILT_IN, AUTO})]


def find_device(name: str) -> type[Device]:
    """Finds the class of a device.

    Args:
        name: One of `device_names`.

    Returns:
        The class.

    Raises:
        ArgumentError: There is no such device, two packages have one of that name, or the package's code cannot be
            imported or is not a device of that name.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    entries = list(entry_points(group=GROUP, name=name))
    if not entries:
        raise ArgumentError(f"there is no device {name!r}: use one of {', '.join(device_names())}")
    if len({entry.value for entry in entries}) > 1:
        raise ArgumentError(f"two packages have a device {name!r}: {' and '.join(sorted(map(_origin, entries)))}")
    return _load(entries[0])


def find_job_device(name: str) -> type[Device]:
    """The same for a device that a job is to use, which reaches other processes. Raises `ArgumentError`."""
    if name in BUILT_IN_FOR_JOBS:
        return BUILT_IN[name]
    if name not in device_names():
        others = [each for each in device_names() if each not in BUILT_IN]
        raise ArgumentError(f"device must be one of {', '.join((AUTO, *BUILT_IN_FOR_JOBS, *others))}, not {name!r}")
    kind = find_device(name)
    if not kind.capabilities.other_processes:
        raise ArgumentError(f"the device {name!r} does not reach other processes, which a job needs")
    return kind


def _load(entry: EntryPoint) -> type[Device]:
    check_name(entry.name)
    what = f"the device {entry.name!r} ({_origin(entry)})"
    try:
        kind = entry.load()
    except Exception as error:  # whatever the package's own code raises
        raise ArgumentError(f"{what} cannot be imported: {type(error).__name__}: {error}") from error
    if not inspect.isclass(kind) or not issubclass(kind, Device) or inspect.isabstract(kind):
        raise ArgumentError(f"{what} is not a complete subclass of tensorwire.device.Device")
    if getattr(kind, "name", None) != entry.name or not hasattr(kind, "capabilities"):
        raise ArgumentError(f"{what} needs the class attributes name = {entry.name!r} and capabilities")
    return kind


def _origin(entry: EntryPoint) -> str:
    return entry.value if entry.dist is None else f"package {entry.dist.name}, {entry.value}"
