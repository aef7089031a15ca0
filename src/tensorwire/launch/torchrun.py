"""How ranks that somebody else started find each other: torchrun's store, or a given rendezvous."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from tensorwire.control.client import split_address
from tensorwire.launch import secret as secrets_
from tensorwire.launch.children import start_coordinator
from tensorwire.launch.place import Place, is_loopback, listening_host

_TIMEOUT = 60.0


def agree(place: Place, children: list[subprocess.Popen[bytes]]) -> tuple[str, bytes, Path | None]:
    """Rank 0 starts the coordinator as its child; everybody returns its address and the secret.

    On one host the secret passes through a file only this user can read; on several ``TENSORWIRE_SECRET_FILE`` holds it.
    """
    if place.starter == "torchrun":
        name = f"torchrun-{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ.get('MASTER_PORT', '')}-{_attempt()}"
    else:
        assert place.rendezvous is not None
        name = f"ranks-{split_address(place.rendezvous)[1]}"
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    if place.rank == 0:
        return _start(place, name, children)
    if place.starter == "torchrun":
        address = _torch_store().get(_key()).decode()
    else:
        assert place.rendezvous is not None
        address = place.rendezvous
    if place.several_hosts:
        return address, secrets_.file_secret(os.environ), None
    return address, secrets_.pick_up(name, _TIMEOUT), None


def _start(place: Place, name: str, children: list[subprocess.Popen[bytes]]) -> tuple[str, bytes, Path | None]:
    path: Path | None = None
    if place.several_hosts:
        secret = secrets_.file_secret(os.environ).decode()
    else:
        secret = secrets_.new_secret()
        path = secrets_.hand_out(name, secret)
    host, port = "127.0.0.1", 0
    if place.rendezvous is not None:
        host, port = split_address(place.rendezvous)
        host = "127.0.0.1" if is_loopback(place.rendezvous) else host
    elif place.several_hosts:
        host = listening_host(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", os.environ)
    try:
        process, address = start_coordinator(secret, place.workers, place.servers, host, port)
    except BaseException:
        if path is not None:
            path.unlink(missing_ok=True)
        raise
    children.append(process)
    if place.starter == "torchrun":
        _torch_store().set(_key(), address)
    return address, secret.encode(), path


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _key() -> str:
    return f"tensorwire/{_attempt()}/coordinator"


def _torch_store() -> Any:
    """torchrun's own key-value store, as a client."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=_TIMEOUT)
    )
