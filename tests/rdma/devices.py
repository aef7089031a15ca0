"""Verbs devices for tests in a guest, by the names that the conformance suite takes."""

from __future__ import annotations

import itertools
import os
import platform
from dataclasses import replace

from tensorwire.device import VerbsDevice
from tests.rdma.machine import INSIDE
from tests.rdma.wire import ADDRESSES, FAR

_ports = itertools.cycle(zip(("rxa", "rxb"), ADDRESSES, strict=True))


def either() -> VerbsDevice:
    """A device on rxa, the next on rxb, and so on: what two of them send each other crosses the cable."""
    port, interface = next(_ports)
    device = VerbsDevice(port, interface=interface)
    if _kernel() < (6, 2):
        device.capabilities = replace(device.capabilities, refuses_midway=False)
    return device


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in platform.release().split(".")[:2])


def own() -> VerbsDevice:
    """The one of this guest, of two."""
    return VerbsDevice("rxe0", interface=dict(zip(("vm1", "vm2"), FAR, strict=True))[os.environ[INSIDE]])
