"""The launcher behind ``tensorwire run``: starts this machine's processes and tells people how the job ended."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorwire.control import Cause, Client, Coordinator
from tensorwire.control.client import split_address
from tensorwire.errors import ArgumentError
from tensorwire.launch import secret as secrets_
from tensorwire.launch.children import start_server
from tensorwire.launch.place import is_loopback, worker_environment

# How long processes may take to leave after the end, before SIGTERM and then SIGKILL.
LEAVE_SECONDS = 6.0
TERM_SECONDS = 2.0


@dataclass(frozen=True)
class RunOptions:
    """What ``tensorwire run`` was asked for; ``workers`` and ``servers`` are per node."""

    command: Sequence[str]
    workers: int = 1
    servers: int = 1
    rendezvous: str | None = None
    nodes: int = 1
    node: int = 0
    device: str = "auto"

    def check(self) -> None:
        """Raises `ArgumentError`."""
        if not self.command:
            raise ArgumentError("say what to run: tensorwire run --workers 2 -- python train.py")
        if shutil.which(self.command[0]) is None:
            raise ArgumentError(f"there is no command {self.command[0]!r}")
        if not 0 <= self.node < self.nodes:
            raise ArgumentError(f"--node {self.node} is not one of {self.nodes} nodes (0 to {self.nodes - 1})")
        if self.nodes > 1 and self.rendezvous is None:
            raise ArgumentError("several nodes need --rendezvous HOST:PORT, the address of node 0")
        if self.rendezvous is not None:
            split_address(self.rendezvous)


class Run:
    """One launcher's share of a job."""

    def __init__(self, options: RunOptions) -> None:
        options.check()
        self._options = options
        self._children: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._events: queue.Queue[Any] = queue.Queue()
        self._coordinator: Coordinator | None = None
        self._client: Client | None = None
        self._status = 0

    def __call__(self) -> int:
        """Runs the job; returns the exit status for the shell."""
        handlers = {s: signal.signal(s, self._interrupted) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            address, secret = self._rendezvous()
            self._start(address, secret)
            cause = self._watch()
            if cause is not None:
                self._status = self._status or 1
                self._tell(cause)
            self._clear()
        finally:
            self._kill()
            for s, handler in handlers.items():
                signal.signal(s, handler)
            if self._client is not None:
                self._client.close(goodbye=True)
            if self._coordinator is not None:
                self._coordinator.close()
        return self._status

    def _rendezvous(self) -> tuple[str, bytes]:
        o = self._options
        several = o.nodes > 1
        secret = secrets_.file_secret(os.environ) if several else secrets_.new_secret().encode()
        if o.node == 0:
            host, port = ("127.0.0.1", 0) if o.rendezvous is None else split_address(o.rendezvous)
            host = "127.0.0.1" if o.rendezvous is not None and is_loopback(o.rendezvous) else host
            self._coordinator = Coordinator(
                secret,
                workers=o.workers * o.nodes,
                servers=o.servers * o.nodes,
                host=host,
                port=port,
                on_end=self._on_end,
            )
            return self._coordinator.address, secret
        assert o.rendezvous is not None
        self._client = Client(o.rendezvous, secret, "launcher", o.node, timeout=120.0)
        self._client.on_end(self._on_end)
        return o.rendezvous, secret

    def _start(self, address: str, secret: bytes) -> None:
        o = self._options
        common = worker_environment(
            os.environ, workers=o.workers * o.nodes, servers=o.servers * o.nodes, device=o.device
        )
        for index in range(o.node * o.servers, (o.node + 1) * o.servers):
            server = start_server(index, address, secret.decode(), common, start_new_session=True)
            self._adopt("server", index, server)
        for rank in range(o.node * o.workers, (o.node + 1) * o.workers):
            environment = worker_environment(common, coordinator=address, secret=secret.decode(), rank=rank)
            process = subprocess.Popen([*_tied(), *o.command], env=environment, start_new_session=True)
            self._adopt("worker", rank, process)

    def _adopt(self, role: str, index: int, process: subprocess.Popen[bytes]) -> None:
        self._children[role, index] = process

        def wait() -> None:
            self._events.put((role, index, process.wait()))

        threading.Thread(target=wait, name=f"tensorwire-wait-{role}-{index}", daemon=True).start()

    def _on_end(self, cause: Cause | None) -> None:
        self._events.put(("end", cause))

    def _interrupted(self, number: int, _: object) -> None:
        self._status = 128 + number
        cause = Cause("the user" if number == signal.SIGINT else signal.Signals(number).name, "interrupted the job")
        if self._coordinator is not None:
            self._coordinator.end(cause)
        elif self._client is not None:
            self._client.fail(cause)
        self._events.put(("end", cause))

    def _watch(self) -> Cause | None:
        """Until the job ends: passes on how processes ended."""
        while True:
            try:
                event = self._events.get(timeout=1.0)  # wakes for Python's signal handlers
            except queue.Empty:
                continue
            if event[0] == "end":
                cause: Cause | None = event[1]
                return cause
            role, index, status = event
            if status and not self._status:
                self._status = status if status > 0 else 128 - status
            if self._coordinator is not None:
                self._coordinator.left(role, index, status)
            elif self._client is not None:
                self._client.report_exit(role, index, status)

    def _tell(self, cause: Cause) -> None:
        trace = f"\n{cause.traceback.rstrip()}" if cause.traceback else ""
        print(f"tensorwire: {cause}{trace}", file=sys.stderr, flush=True)

    def _clear(self) -> None:
        """Waits for this machine's processes to leave."""
        for process in self._children.values():
            try:
                status = process.wait(LEAVE_SECONDS)
                if status > 0 and not self._status:
                    self._status = status
            except subprocess.TimeoutExpired:
                break

    def _kill(self) -> None:
        for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, 10.0)):
            left = [p for p in self._children.values() if p.poll() is None]
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            for process in left:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)


def _tied() -> list[str]:
    """A prefix that ends a child with this launcher, however that dies."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
