"""Servers and workers of a job among the programs of a benchmark; also for programs without torch."""

from __future__ import annotations

import os
import threading

from tensorwire.bench.actors.lines import Lines
from tensorwire.control import Coordinator, Member
from tensorwire.launch.server_process import serve as serve_stores


def join_as_server(lines: Lines, index: int, device: str, workers: int, servers: int, interface: str) -> Member:
    """Server ``index`` of the job. Server 0 holds the coordinator, and says its address to all."""
    secret = os.environ["TENSORWIRE_SECRET"].encode()
    address = "-"
    if index == 0:
        address = Coordinator(secret, workers=workers, servers=servers, interface=interface).address
    address = lines.hello(address).split()[0]
    return Member(address, secret, "server", index, device=device, interface=interface)


def serve(lines: Lines, index: int, device: str, workers: int, servers: int, interface: str) -> threading.Thread:
    """Serves by itself from now on, in a thread that ends with the job."""
    member = join_as_server(lines, index, device, workers, servers, interface)
    thread = threading.Thread(target=serve_stores, args=(member,), daemon=True)
    thread.start()
    return thread


def join(lines: Lines, index: int, device: str, workers: int, servers: int, line: str = "-") -> None:
    """What ``tensorwire.init()`` of a worker needs is in its environment. ``line``: what it tells the others."""
    os.environ.update(
        TENSORWIRE_COORDINATOR=lines.hello(line).split()[0],
        TENSORWIRE_RANK=str(index),
        TENSORWIRE_WORKERS=str(workers),
        TENSORWIRE_SERVERS=str(servers),
        TENSORWIRE_DEVICE=device,
    )
