"""Another process with a device, driven by a test over a socket pair.

``Peer`` is the test's side. The other side runs this file: one command at a time, each a method of ``Commands``.
"""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tensorwire.device import Channel, Device, LoopbackDevice, Region, RemoteRegion, ShmDevice, TcpDevice

DEVICES: dict[str, type[Device]] = {"loopback": LoopbackDevice, "shm": ShmDevice, "tcp": TcpDevice}
SECONDS = 60.0  # for waits that must end long before

_base = np.random.default_rng(1).integers(0, 256, (18 << 20) + 8192, dtype=np.uint8)


def pattern(seed: int, nbytes: int) -> np.ndarray:
    """Bytes that tell one write from another, at every place."""
    start = seed * 61 % 8192
    return _base[start : start + nbytes]


def array(region: Any) -> np.ndarray:
    """The bytes of a region or a view, writable if it is."""
    return np.frombuffer(memoryview(region), np.uint8)


def until_asleep(pid: int, thread: int | None = None) -> None:
    """Returns when a thread (the main one by default) of a process sleeps in the kernel."""
    stat = Path(f"/proc/{pid}/task/{thread or pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "S":
        os.sched_yield()


def verify(region: Region, plan: list[tuple[int, int, int]]) -> int:
    """The racing reader: whenever signal ``i`` is visible, payload ``i`` must be whole. Returns how many it checked."""
    here = array(region)
    for i, offset, nbytes in plan:
        if i % 2:
            region.wait(0, i, SECONDS)
        else:
            while region.load(0) < i:
                pass
        got, want = here[offset : offset + nbytes], pattern(i, nbytes)
        # The last bytes first: they are the ones a reader that came too early would miss.
        assert np.array_equal(got[-64:], want[-64:]), f"the end of payload {i} is missing"
        assert np.array_equal(got, want), f"payload {i} is torn"
    return len(plan)


class Peer:
    """A child process with one device. Usable as a context manager; then it is gone at the end."""

    def __init__(self, kind: str, inherit: tuple[int, ...] = ()) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, kind, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno(), *inherit])
        self._pipe = Connection(ours.detach())
        self.pid = self.process.pid
        self.address = self.call("address")

    def start(self, command: str, *arguments: Any) -> None:
        """Begins a command; the child has entered it when this returns."""
        self._pipe.send((command, arguments))
        assert self._pipe.recv() == ("started", None)

    def finish(self) -> Any:
        """What the command returned; raises what it raised."""
        kind, value = self._pipe.recv()
        if kind == "raised":
            raise value
        return value

    def call(self, command: str, *arguments: Any) -> Any:
        self.start(command, *arguments)
        return self.finish()

    def allocate(self, nbytes: int, access: str = "write", *, reserve: bool = True) -> RemoteRegion:
        """A region of the child; it answers to the number of its key from then on."""
        return RemoteRegion.unpack(self.call("allocate", nbytes, access, reserve))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self._pipe.close()
        try:
            self.process.wait(SECONDS)
        finally:
            self.kill()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Commands:
    """What the child can be told to do."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.device = DEVICES[kind]()
        self.regions: dict[int, Region] = {}
        self.channel: Channel | None = None

    def address(self) -> bytes:
        return self.device.address

    def allocate(self, nbytes: int, access: Any, reserve: bool) -> bytes:
        region = self.device.allocate(nbytes, reserve=reserve)
        remote = region.remote(access)
        self.regions[remote.key] = region
        return remote.pack()

    def connect(self, address: bytes) -> None:
        self.channel = self.device.connect(address)

    def signal(self, remote: bytes, offset: int, value: int) -> None:
        assert self.channel is not None
        self.channel.signal(RemoteRegion.unpack(remote).view(offset, 8), value).wait(SECONDS)

    def content(self, key: int, offset: int, nbytes: int) -> bytes:
        return bytes(self.regions[key].view(offset, nbytes).buffer)

    def fill(self, key: int, offset: int, data: bytes) -> None:
        self.regions[key].view(offset, len(data)).buffer[:] = data

    def close_region(self, key: int) -> None:
        self.regions[key].close()

    def verify(self, key: int, plan: list[tuple[int, int, int]]) -> int:
        return verify(self.regions[key], plan)

    def watch_word(self, key: int, word: int, offset: int, nbytes: int, rounds: int) -> int:
        """Counts rounds in which a payload was visible no later than the plain word written after it."""
        region = self.regions[key]
        here = array(region)
        for i in range(1, rounds + 1):
            while region.load(word) < i:
                pass
            if not np.all(here[offset + i * nbytes : offset + (i + 1) * nbytes] == i):
                return i
        return rounds

    def wait(self, key: int, at_least: int, seconds: float) -> str:
        try:
            self.regions[key].wait(0, at_least, seconds)
        except KeyboardInterrupt:
            return "interrupted"
        return "reached"

    def die_when_asleep(self, pid: int) -> None:
        until_asleep(pid)
        os.kill(os.getpid(), signal.SIGKILL)

    def fork_idler(self, fd: int) -> int:
        """A forked child that lives until ``fd`` ends."""
        child = os.fork()
        if child == 0:
            os.read(fd, 1)
            os._exit(0)
        return child

    def fork_and_use(self, remote: bytes) -> dict[str, str]:
        """What a forked child gets from everything its parent made; it closes it all, too."""
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writable, repr(self._use(remote)).encode())
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(writable)
        with open(readable, "rb") as pipe:
            told = pipe.read()
        assert os.waitpid(child, 0)[1] == 0
        result: dict[str, str] = ast.literal_eval(told.decode())
        return result

    def _use(self, remote: bytes) -> dict[str, str]:
        channel, region = self.channel, next(iter(self.regions.values()))
        assert channel is not None
        there = RemoteRegion.unpack(remote)
        attempts: dict[str, Callable[[], object]] = {
            "write": lambda: channel.write(region.view(0, 8), there.view(0, 8)).wait(SECONDS),
            "read": lambda: channel.read(region.view(0, 8), there.view(0, 8)).wait(SECONDS),
            "signal": lambda: channel.signal(there.view(0, 8), 9).wait(SECONDS),
            "fetch_add": lambda: channel.fetch_add(there.view(0, 8), 1),
            "wait": lambda: region.wait(0, 2**63, SECONDS),
            "allocate": lambda: self.device.allocate(8),
            "connect": lambda: self.device.connect(self.device.address),
        }
        told = {}
        for name, attempt in attempts.items():
            try:
                attempt()
            except Exception as error:
                told[name] = f"{type(error).__name__}: {error}"
            else:
                told[name] = "worked"
        for each in (region, channel, self.device, self.device):
            each.close()
        with DEVICES[self.kind]() as fresh, fresh.connect(fresh.address) as own:
            own.signal(fresh.allocate(8).remote().view(), 1).wait(SECONDS)
        told["a device of its own"] = "worked"
        return told


def main() -> None:
    commands, pipe = Commands(sys.argv[1]), Connection(int(sys.argv[2]))
    with contextlib.suppress(EOFError), commands.device:
        while True:
            name, arguments = pipe.recv()
            try:
                pipe.send(("started", None))
                pipe.send(("returned", getattr(commands, name)(*arguments)))
            except Exception as error:
                pipe.send(("raised", error))


if __name__ == "__main__":
    main()
