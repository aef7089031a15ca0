"""The name of a device on a command line, from which another process can make the same device."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from dataclasses import dataclass

from tensorwire.device import Device, device_names, find_device
from tensorwire.errors import ArgumentError
from tensorwire.testing.faulty import FaultyDevice

DELAYED = "+delays"
DELAY_SECONDS = 0.0003  # long enough that later calls overtake, short enough for thousands of operations


@dataclass(frozen=True)
class DeviceSpec:
    """An installed device's name, or ``package.module:factory``.

    ``+delays`` after it runs the device in a `FaultyDevice` that holds every operation back.
    """

    text: str

    @property
    def label(self) -> str:
        """The factory's own name, for the names of tests."""
        return self.text.rpartition(":")[2]

    def make(self) -> Device:
        """A device of this kind. Raises `ArgumentError` for what names none."""
        factory = self._find()
        device = factory()
        if not isinstance(device, Device):
            raise ArgumentError(f"{self.text} makes a {type(device).__name__}, not a tensorwire.device.Device")
        return FaultyDevice(device, delay=DELAY_SECONDS) if self.text.endswith(DELAYED) else device

    def _find(self) -> Callable[[], object]:
        module, colon, name = self.text.removesuffix(DELAYED).partition(":")
        if not colon and module in device_names():
            return find_device(module)
        if not colon or not name or not module:
            raise ArgumentError(f"{self.text!r}: give an installed device's name, or package.module:factory")
        try:
            factory: Callable[[], object] = operator.attrgetter(name)(importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            raise ArgumentError(f"{self.text}: {error}") from None
        return factory
