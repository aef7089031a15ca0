"""How ranks started by another launcher find each other: through torchrun's store, or a given rendezvous."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tensorwire.control.address import await_name, split_address
from tensorwire.launch import secret as secrets_
from tensorwire.launch.children import Child, start_coordinator
from tensorwire.launch.place import Place, is_loopback, listening_interface
from tensorwire.launch.secret import Handout

# How long the other ranks wait for rank 0, which may have data to load first.
JOIN_SECONDS = 600.0


@dataclass(frozen=True)
class Rendezvous:
    """Where the coordinator is, the job's secret, and what rank 0 has left for others until everybody has joined."""

    address: str
    secret: str
    patience: float = 0.0
    handout: Handout | None = None


def agree(place: Place, number: int, children: list[Child]) -> Rendezvous:
    """Rank 0 starts the coordinator as its child; everybody returns its address and the secret.

    On one machine the secret passes through a file only this user can read; on several it is in
    ``TENSORWIRE_SECRET_FILE``. ``number``: how many jobs this process was in before.
    """
    if place.rank == 0:
        return _start(place, number, children)
    secret = secrets_.file_secret(os.environ) if place.several_machines else _picked_up(place, number)
    if place.starter == "torchrun":
        return Rendezvous(_torch_store().get(_key(number)).decode(), secret)
    assert place.rendezvous is not None
    return Rendezvous(place.rendezvous, secret, JOIN_SECONDS if place.several_machines else 0.0)


def _picked_up(place: Place, number: int) -> str:
    return secrets_.pick_up(_name(place, number), JOIN_SECONDS).decode()


def _name(place: Place, number: int) -> str:
    """The name of this job's secret among the files of this user's jobs."""
    if place.starter == "torchrun":
        name = f"torchrun-{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ.get('MASTER_PORT', '')}-{_attempt()}"
    else:
        assert place.rendezvous is not None
        name = f"ranks-{split_address(place.rendezvous)[1]}"
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in f"{name}-{number}")[-200:]


def _start(place: Place, number: int, children: list[Child]) -> Rendezvous:
    secret = secrets_.file_secret(os.environ) if place.several_machines else secrets_.new_secret()
    host, port = "127.0.0.1", 0
    if place.rendezvous is not None:
        host, port = split_address(place.rendezvous)
        host = "127.0.0.1" if is_loopback(place.rendezvous) else host
        await_name(host, JOIN_SECONDS)
    elif place.several_machines:
        host = listening_interface(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", os.environ)
    child, address = start_coordinator(secret, place, host, port)
    children.append(child)
    handout = None if place.several_machines else Handout(_name(place, number), secret)
    try:
        if place.starter == "torchrun":
            _torch_store().set(_key(number), address)
    except BaseException:
        if handout is not None:
            handout.close()
        raise
    return Rendezvous(address, secret, handout=handout)


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _key(number: int) -> str:
    return f"tensorwire/{_attempt()}/{number}/coordinator"


def _torch_store() -> Any:
    """torchrun's own key-value store, as a client."""
    from datetime import timedelta

    from torch import distributed

    host, port = split_address(f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}")
    store = getattr(distributed, "TCPStore")  # noqa: B009 (torch does not list it among its exports)
    return store(host, port, is_master=False, timeout=timedelta(seconds=JOIN_SECONDS))
