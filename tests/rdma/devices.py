"""Verbs devices for tests in a guest, by the name that the conformance suite takes."""

from __future__ import annotations

import itertools

from tensorwire.device import VerbsDevice
from tests.rdma.wire import ADDRESSES

_ports = itertools.cycle(zip(("rxa", "rxb"), ADDRESSES, strict=True))


def either() -> VerbsDevice:
    """A device on rxa, the next on rxb, and so on: what two of them send each other crosses the cable."""
    port, host = next(_ports)
    return VerbsDevice(port, host=host)
