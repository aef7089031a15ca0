"""Verbs devices for tests in a guest, by the names that the conformance suite takes."""

from __future__ import annotations

import itertools
import os

from tensorwire.device import VerbsDevice
from tests.rdma.machine import INSIDE
from tests.rdma.wire import ADDRESSES, FAR

_ports = itertools.cycle(zip(("rxa", "rxb"), ADDRESSES, strict=True))


def either() -> VerbsDevice:
    """A device on rxa, the next on rxb, and so on: what two of them send each other crosses the cable."""
    port, host = next(_ports)
    return VerbsDevice(port, host=host)


def own() -> VerbsDevice:
    """The one of this guest, of two."""
    return VerbsDevice("rxe0", host=dict(zip(("vm1", "vm2"), FAR, strict=True))[os.environ[INSIDE]])
