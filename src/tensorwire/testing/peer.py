"""Another process with a device, driven by a test over a socket pair.

``Peer`` is the test's side. The other side runs one command at a time, each a method of ``Commands``. Both are one
test's own processes and trust each other, so multiprocessing's connections suffice between them.
"""

from __future__ import annotations

import ast
import contextlib
import os
import select
import signal
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tensorwire.device import Channel, Region, RemoteRegion
from tensorwire.testing import patterns
from tensorwire.testing.forkserver import forkserver
from tensorwire.testing.patience import patient
from tensorwire.testing.patterns import HEAD, SECONDS, array
from tensorwire.testing.spec import DeviceSpec

_IDLER_SECONDS = int(patient(120))  # a forked child that nobody ends ends itself


class Peer:
    """A child process with one device. Usable as a context manager; then it is gone at the end."""

    def __init__(self, spec: DeviceSpec) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.pid, self._pidfd = forkserver().fork(spec.text, theirs.fileno())
        self._pipe = Connection(ours.detach())
        self._ended = False
        try:
            self.address: bytes = self._receive()
        except BaseException:
            self.close()
            raise

    def start(self, command: str, *arguments: Any) -> None:
        """Begins a command; the child has entered it when this returns."""
        self._pipe.send((command, arguments))
        assert self._receive() == "started"

    def finish(self) -> Any:
        """What the command returned; raises what it raised."""
        return self._receive()

    def call(self, command: str, *arguments: Any) -> Any:
        """``start``, then ``finish``."""
        self.start(command, *arguments)
        return self.finish()

    def _receive(self) -> Any:
        assert self._pipe.poll(SECONDS), "the other process does not answer"
        kind, value = self._pipe.recv()
        if kind == "raised":
            raise value
        return value

    def allocate(self, nbytes: int, access: str = "write", *, reserve: bool = True) -> RemoteRegion:
        """A region of the child; it answers to the number of its key from then on."""
        remote: RemoteRegion = self.call("allocate", nbytes, access, reserve)
        return remote

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        signal.pidfd_send_signal(self._pidfd, number)

    def stop(self) -> None:
        """Stops the process; none of its threads runs any more when this returns."""
        self.signal(signal.SIGSTOP)
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            while patterns.state(self.pid, int(task.name)) not in "TX":
                os.sched_yield()

    def resume(self) -> None:
        """Lets it go on."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the process with SIGKILL, and returns when it has ended. Idempotent."""
        if not self._ended:
            self.signal(signal.SIGKILL)
            assert select.select([self._pidfd], [], [], SECONDS)[0]
            self._ended = True

    def close(self) -> None:
        """Ends the process in order, if it is still there. Idempotent."""
        if self._pipe.closed:
            return
        self._pipe.close()
        try:
            if not self._ended:
                self.resume()
                self._ended = bool(select.select([self._pidfd], [], [], SECONDS)[0])
                assert self._ended, "the other process did not end"
        finally:
            self.kill()
            os.close(self._pidfd)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Commands:
    """What the child can be asked to do."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self.device = spec.make()
        self.regions: dict[int, Region] = {}
        self.channels: list[Channel] = []

    @property
    def channel(self) -> Channel:
        """The last one that was made."""
        return self.channels[-1]

    def allocate(self, nbytes: int, access: Any, reserve: bool) -> RemoteRegion:
        """A region, kept under the key it is shown with."""
        region = self.device.allocate(nbytes, reserve=reserve)
        remote = region.remote(access)
        self.regions[remote.key] = region
        return remote

    def connect(self, address: bytes) -> None:
        """One more channel."""
        self.channels.append(self.device.connect(address))

    def send_signal(self, remote: RemoteRegion, offset: int, value: int) -> None:
        """Sets a word of the test's."""
        self.channel.signal(remote.view(offset, 8), value).wait(SECONDS)

    def content(self, key: int, offset: int, nbytes: int) -> bytes:
        """The bytes of a region."""
        return bytes(self.regions[key].view(offset, nbytes).buffer)

    def fill(self, key: int, offset: int, data: bytes) -> None:
        """Puts bytes into a region."""
        self.regions[key].view(offset, len(data)).buffer[:] = data

    def close_region(self, key: int) -> None:
        """Closes a region, and keeps it."""
        self.regions[key].close()

    def verify(self, key: int, plan: patterns.Plan) -> int:
        """See ``patterns.verify``."""
        return patterns.verify(self.regions[key], plan)

    def exchange(self, key: int, theirs: RemoteRegion, nbytes: int, rounds: int) -> None:
        """See ``patterns.exchange``."""
        patterns.exchange(self.device, self.channel, self.regions[key], theirs, nbytes, rounds)

    def flood(self, theirs: RemoteRegion, value: int, times: int) -> bytes:
        """See ``patterns.flood``; returns what it read last."""
        source, back = self.device.allocate(theirs.length), self.device.allocate(theirs.length)
        array(source)[:] = value
        patterns.flood(self.channel, source.view(), theirs, back.view(), times)
        return bytes(back)

    def contend(self, words: RemoteRegion, rounds: int, name: int) -> tuple[int, list[int]]:
        """See ``patterns.contend``."""
        return patterns.contend(self.channel, words, rounds, name)

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

    def overwrite(self, key: int, nbytes: int, rounds: int) -> None:
        """Each time the first word says that the rest was read, puts something else there."""
        region = self.regions[key]
        for i in range(1, rounds + 1):
            region.wait(0, i, SECONDS)
            array(region)[HEAD : HEAD + nbytes] = i % 256

    def wait(self, key: int, at_least: int, seconds: float) -> str:
        """Waits for the first word of a region."""
        try:
            self.regions[key].wait(0, at_least, seconds)
        except KeyboardInterrupt:
            return "interrupted"
        return "reached"

    def die_when_asleep(self, pid: int) -> None:
        """Dies once that process's main thread sleeps."""
        patterns.until_asleep(pid)
        os.kill(os.getpid(), signal.SIGKILL)

    def fork_idler(self) -> int:
        """A forked child that lives until somebody kills it."""
        child = os.fork()
        if child == 0:
            signal.alarm(_IDLER_SECONDS)
            while True:
                signal.pause()
        return child

    def fork_and_use(self, remote: RemoteRegion) -> dict[str, str]:
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
            answers = pipe.read()
        assert os.waitpid(child, 0)[1] == 0
        result: dict[str, str] = ast.literal_eval(answers.decode())
        return result

    def _use(self, there: RemoteRegion) -> dict[str, str]:
        channel, region = self.channel, next(iter(self.regions.values()))
        attempts: dict[str, Callable[[], object]] = {
            "write": lambda: channel.write(region.view(0, 8), there.view(0, 8)).wait(SECONDS),
            "read": lambda: channel.read(region.view(0, 8), there.view(0, 8)).wait(SECONDS),
            "signal": lambda: channel.signal(there.view(0, 8), 9).wait(SECONDS),
            "wait": lambda: region.wait(0, 2**63, SECONDS),
            "allocate": lambda: self.device.allocate(8),
            "connect": lambda: self.device.connect(self.device.address),
        }
        if self.device.capabilities.atomics:
            attempts["fetch_add"] = lambda: channel.fetch_add(there.view(0, 8), 1)
        answers = {}
        for name, attempt in attempts.items():
            try:
                attempt()
            except Exception as error:
                answers[name] = f"{type(error).__name__}: {error}"
            else:
                answers[name] = "worked"
        for each in (region, channel, self.device, self.device):
            each.close()
        with self.spec.make() as fresh, fresh.connect(fresh.address) as own:
            own.signal(fresh.allocate(8).remote().view(), 1).wait(SECONDS)
        answers["a device of its own"] = "worked"
        return answers


def serve(spec: str, fd: int) -> None:
    """The child's liveness."""
    pipe = Connection(fd)
    try:
        commands = Commands(DeviceSpec(spec))
    except Exception as error:
        pipe.send(("raised", error))
        return
    with contextlib.suppress(EOFError, BrokenPipeError), commands.device:
        pipe.send(("returned", commands.device.address))
        while True:
            name, arguments = pipe.recv()
            try:
                pipe.send(("returned", "started"))
                pipe.send(("returned", getattr(commands, name)(*arguments)))
            except Exception as error:
                pipe.send(("raised", error))
