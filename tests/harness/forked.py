"""Cheap peers: children forked from the test that do what a function says, with devices of their own, and then wait."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorwire.device import Channel, Device, LoopbackDevice, ShmDevice, TcpDevice
from tensorwire.errors import PeerLost
from tensorwire.testing.patience import patient
from tensorwire.testing.patterns import SECONDS, state

BEAT, LOST_AFTER = 0.05, patient(1.0)
NEVER = 1000.0  # as `lost_after`: silence ends nothing, only a death or a hang-up does


def quick(kind: str, heartbeat: float = BEAT, lost_after: float = LOST_AFTER, interface: str = "127.0.0.1") -> Device:
    """A device that soon takes a silent peer for lost."""
    if kind == "shm":
        return ShmDevice(heartbeat, lost_after)
    if kind == "tcp":
        return TcpDevice(interface, heartbeat=heartbeat, lost_after=lost_after)
    return LoopbackDevice()


def connect(device: Device, address: bytes) -> Channel:
    """A channel, however often the impatient peer at the other end of a busy machine gives us up meanwhile."""
    while True:
        try:
            return device.connect(address)
        except PeerLost:
            os.sched_yield()


def send(sock: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    sock.sendall(struct.pack("<I", len(data)) + data)


def receive(sock: socket.socket) -> Any:
    def exactly(nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            part = sock.recv(nbytes - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    return pickle.loads(exactly(*struct.unpack("<I", exactly(4))))


class Forked:
    """``work(pipe)`` in a forked child, which then lives until the pipe ends. The test's end is ``pipe``."""

    def __init__(self, work: Callable[[socket.socket], object]) -> None:
        self.pipe, theirs = socket.socketpair()
        self.pipe.settimeout(SECONDS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child uses none of what they hold
            self.pid = os.fork()
        if self.pid == 0:
            self._child(work, theirs)
        theirs.close()
        self._reaped = False

    def _child(self, work: Callable[[socket.socket], object], pipe: socket.socket) -> None:
        try:
            self.pipe.close()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            work(pipe)
            with contextlib.suppress(EOFError):
                receive(pipe)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Stops it; none of its threads runs any more when this returns."""
        self.signal(signal.SIGSTOP)
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            while state(self.pid, int(task.name)) not in "TX":
                os.sched_yield()

    def resume(self) -> None:
        """Lets it go on."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        if not self._reaped:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._reaped = True

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
        self.kill()
