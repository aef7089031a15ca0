"""A job among the programs of a benchmark: server 0 holds the coordinator, and says its address to all."""

from __future__ import annotations

import os
import threading

from tensorwire.bench.actors.lines import Lines
from tensorwire.bench.actors.transfer import counts, since
from tensorwire.control import Coordinator, Member
from tensorwire.launch.server_process import serve as serve_stores


def join_as_server(lines: Lines, index: int, workers: int, servers: int, device: str, interface: str) -> Member:
    """Server ``index`` of the job."""
    secret = os.environ["TENSORWIRE_SECRET"].encode()
    address = "-"
    if index == 0:
        coordinator = Coordinator(secret, workers=workers, servers=servers, interface=interface)
        address = coordinator.address
    address = lines.hello(address).split()[0]
    return Member(address, secret, "server", index, device=device, interface=interface)


def serve(lines: Lines, index: int, workers: int, servers: int, device: str, interface: str) -> None:
    """A server's rounds, which it serves by itself; it tells what it counted in them."""
    member = join_as_server(lines, index, workers, servers, device, interface)
    threading.Thread(target=serve_stores, args=(member,), daemon=True).start()
    before = counts()
    for _ in lines.runs():
        lines.answer(**since(before))
        before = counts()


def join(lines: Lines, index: int, workers: int, servers: int, device: str) -> None:
    """What ``tensorwire.init()`` of a worker needs is in its environment."""
    os.environ.update(
        TENSORWIRE_COORDINATOR=lines.hello().split()[0],
        TENSORWIRE_RANK=str(index),
        TENSORWIRE_WORKERS=str(workers),
        TENSORWIRE_SERVERS=str(servers),
        TENSORWIRE_DEVICE=device,
    )
