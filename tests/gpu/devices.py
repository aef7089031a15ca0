"""The accelerator that is measured, and what differs between kinds of it."""

from __future__ import annotations

import itertools
import os
import time
from multiprocessing import forkserver

import torch

from tests.accelerator import simulated

SIMULATED = "sim"
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class NoDevice(Exception):
    """There is nothing to measure, and why."""


def choose(wanted: str | None) -> str:
    """The kind of device: the wanted one, else this machine's. Raises `NoDevice`."""
    if wanted == SIMULATED:
        if why := simulated.unavailable():
            raise NoDevice(why)
        return SIMULATED
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or (wanted is not None and found.type != wanted):
        has = "no accelerator" if found is None else f"the accelerator {found.type!r}, not {wanted!r}"
        raise NoDevice(
            f"PyTorch {torch.__version__} finds {has}: run this where it finds one, or try the program with "
            "--device sim --quick"
        )
    return found.type


def prepare(kind: str) -> torch.device:
    """Once in every process that uses the device, before anything else there. Returns the first one of the kind."""
    if kind == SIMULATED:
        from tensorwire.torch import page_locking

        simulated.load()
        torch.set_num_threads(1)  # its kernels are small, and all processes compute on the same cores
        page_locking.DRIVERS[SIMULATED] = lambda: page_locking.Driver(
            lambda address, nbytes, read_only: simulated.register(address, nbytes), simulated.unregister
        )
    return torch.device(kind, 0)


def hide_from_servers() -> None:
    """Before a program's first job: the process that servers are forked from sees no accelerator.

    An optimizer's ``step()`` asks for the current stream of the accelerator that PyTorch finds. In a server that would
    make a context on it, and in one that was forked after PyTorch had looked for devices it is an error.
    """
    before = {name: os.environ.get(name) for name in _VISIBLE}
    os.environ.update(dict.fromkeys(_VISIBLE, ""))
    forkserver.ensure_running()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def name(device: torch.device) -> str:
    """What people call it."""
    if device.type == SIMULATED:
        return "simulated on the CPU: its figures mean nothing"
    properties = getattr(torch, device.type).get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def memory(device: torch.device) -> int:
    """How many bytes it has; a guess for the simulated one."""
    if device.type == SIMULATED:
        return 4 << 30
    return int(getattr(torch, device.type).get_device_properties(device).total_memory)


class Ticks:
    """Marks on the device's own time line, between the work that is issued before and after them: no host wait."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._events = device, list[torch.Event]()
        self._times: list[float] = []

    def mark(self) -> None:
        """Marks the end of what the current stream has been given. The simulated device is waited for instead."""
        if self._device.type == SIMULATED:
            torch.accelerator.synchronize(self._device)
            self._times.append(time.perf_counter())
            return
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        self._events.append(event)

    def seconds(self) -> list[float]:
        """The time between each two marks; the device has to be idle."""
        if self._times:
            return [after - before for before, after in itertools.pairwise(self._times)]
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(self._events)]
