"""Servers of a job among the programs of a benchmark; also for programs without torch."""

from __future__ import annotations

import os

from tensorwire.bench.actors.lines import Lines
from tensorwire.control import Coordinator, Member


def join_as_server(lines: Lines, index: int, device: str, workers: int, servers: int, interface: str) -> Member:
    """Server ``index`` of the job. Server 0 holds the coordinator, and says its address to all."""
    secret = os.environ["TENSORWIRE_SECRET"].encode()
    address = "-"
    if index == 0:
        address = Coordinator(secret, workers=workers, servers=servers, interface=interface).address
    address = lines.hello(address).split()[0]
    return Member(address, secret, "server", index, device=device, interface=interface)
