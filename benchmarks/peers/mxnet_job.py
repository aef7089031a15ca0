"""A job of MXNet's processes, one server and its workers, for a store by its name in MXNet.

``dist_sync`` is MXNet's own: the server's program starts ps-lite's scheduler and server as processes of their own, and
workers join when these two have met. All other names are Tensorwire's. Run by itself, this file is such a process.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.actors import members
from tensorwire.bench.actors import store_job
from tensorwire.bench.actors.lines import Lines

OWN = "dist_sync"  # MXNet's own store
_LISTENING, _ESTABLISHED = "0A", "01"  # states of a socket in /proc/net/tcp
_PATIENCE_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


def serve(lines: Lines, store: str, device: str, workers: str, servers: str, host: str) -> None:
    """The server's rounds, which it serves by itself."""
    if store != OWN:
        members.serve(lines, 0, device, int(workers), int(servers), host)
        return
    with socket.socket() as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    os.environ.update(_settings(f"{host}:{port}", workers, host))
    for role, state in (("scheduler", _LISTENING), ("server", _ESTABLISHED)):
        process = subprocess.Popen([sys.executable, __file__, role], stdin=subprocess.DEVNULL)
        threading.Thread(target=_watch, args=(process, role), daemon=True).start()
        _await(port, state)
    lines.hello(f"{host}:{port}")
    for _ in lines.runs():
        lines.answer()


def join(lines: Lines, index: str, store: str, device: str, workers: str, servers: str, host: str) -> tuple[Any, Any]:
    """MXNet, and the store of worker ``index``."""
    if store != OWN:
        store_job.join(lines, int(index), device, int(workers), int(servers))
        importlib.import_module("tensorwire.mxnet")  # before MXNet
    else:
        os.environ.update(_settings(lines.hello().split()[0], workers, host), DMLC_ROLE="worker")
    mx = load()
    return mx, mx.kv.create(store)


def load() -> Any:
    """MXNet, which asks numpy for a name that is gone."""
    vars(np).setdefault("bool", bool)
    return importlib.import_module("mxnet")


def run_program(work: Callable[..., None], own: int = 0) -> None:
    """Runs a server, or ``work(lines, MXNet, store, *words)``; ``own``: how many words precede the job's.

    After a failure it ends at once, because MXNet's own store would wait for the other workers.
    """
    role, index, store, *words = sys.argv[1:]
    lines, job = Lines(), words[own:]
    try:
        if role == "server":
            serve(lines, store, *job)
        else:
            work(lines, *join(lines, index, store, *job), *words[:own])
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _settings(address: str, workers: str, host: str) -> dict[str, str]:
    root, _, port = address.rpartition(":")
    return {
        "DMLC_PS_ROOT_URI": root,
        "DMLC_PS_ROOT_PORT": port,
        "DMLC_NUM_WORKER": workers,
        "DMLC_NUM_SERVER": "1",
        "DMLC_NODE_HOST": host,
    }


def _await(port: int, state: str) -> None:
    """Until a socket of this port is in ``state``."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        if any(int(fields[1].rpartition(":")[2], 16) == port and fields[3] == state for fields in sockets):
            return
        if time.monotonic() > end:
            raise SystemExit("MXNet's scheduler and server did not meet")
        time.sleep(0.02)


def _watch(process: subprocess.Popen[bytes], role: str) -> None:
    status = process.wait()
    print(f"MXNet's {role} ended with status {status}", file=sys.stderr, flush=True)
    os._exit(1)


def main(role: str) -> None:
    """A scheduler or a server, which MXNet is as soon as it is imported."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["DMLC_ROLE"] = role
    load()


if __name__ == "__main__":
    main(*sys.argv[1:])
