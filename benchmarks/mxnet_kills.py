"""``python -m benchmarks mxnet --part kill``: what is left of a job does when one of its processes is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from threading import Timer

from benchmarks.libraries import PROGRAMS
from benchmarks.mxnet_jobs import OWN, STORES
from tensorwire.bench.programs import OURS, ProgramFailed
from tensorwire.bench.show import Notes

ROLES = ("scheduler", "server", "worker 0", "worker 1")
HEAD = ("store", "killed", *ROLES)
KILLED = ("worker 1", "server")
TITLE = "What the rest of a job does when one of its processes is killed"
PATIENCE = 30.0  # seconds
_BEGIN_SECONDS = 60.0
_LOOK_SECONDS = 0.02


def rows(python: str, patience: float, notes: Notes) -> list[tuple[str, ...]]:
    """By store and by who was killed, what each process had done ``patience`` seconds later."""
    made = []
    for store in (OURS, OWN):
        for killed in KILLED:
            notes.progress(f"{store}: killing {killed}")
            ended = kill(python, store, killed, patience)
            made.append((store, killed, *("killed" if role == killed else ended[role] for role in ROLES)))
    return made


def kill(python: str, store: str, killed: str, patience: float) -> dict[str, str]:
    """One job. Raises `ProgramFailed` where it does not begin."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
    }
    command = [python, str(PROGRAMS / "mxnet_endless.py"), STORES[store]]
    with contextlib.ExitStack() as stack:
        processes = {}
        for role in ROLES:
            environment = {**os.environ, **shared, "DMLC_ROLE": role.split()[0]}
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            processes[role] = process
        _await_workers(processes)
        start = time.monotonic()
        processes[killed].send_signal(signal.SIGKILL)
        return _watch(processes, start, patience)


def _await_workers(processes: Mapping[str, subprocess.Popen[str]]) -> None:
    def give_up() -> None:
        for process in processes.values():
            process.kill()

    guard = Timer(_BEGIN_SECONDS, give_up)
    guard.start()
    try:
        for role, process in processes.items():
            assert process.stdout is not None
            if role.startswith("worker") and process.stdout.readline() != "ready\n":
                raise ProgramFailed(f"{role} did not begin: its status is {process.poll()}")
    finally:
        guard.cancel()


def _watch(processes: Mapping[str, subprocess.Popen[str]], start: float, patience: float) -> dict[str, str]:
    found: dict[str, str] = {}
    while len(found) < len(processes) and time.monotonic() - start < patience:
        for role, process in processes.items():
            if role not in found and process.poll() is not None:
                found[role] = f"ended after {time.monotonic() - start:.1f} s, status {process.returncode}"
        time.sleep(_LOOK_SECONDS)
    return {role: found.get(role, f"still waits after {patience:.0f} s") for role in processes}
