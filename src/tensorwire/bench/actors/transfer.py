"""Writes by the public API with prepared views: ``target|initiator DEVICE NBYTES MODE HOST [LIBRARY]``.

``ping-pong``: both ends write and wait for the other's signal. ``waiting-target``: the target waits for the last
signal, so it drives its device. ``passive-target``: its process sleeps. ``one-way``: two writes (verbs: 4) are always
outstanding, the target waits. ``one-signal``: the same, with a signal after the last one only. ``both-ways``: from
both ends at once. A run with a word is one of the copies and flags in the library instead (``c/memory.c``),
between the same memory.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections import deque
from collections.abc import Callable

from tensorwire.bench.actors.lines import Lines, check, fill, timed
from tensorwire.device import Completion, Device, RemoteRegion, find_device
from tensorwire.errors import WaitTimeout
from tensorwire.observe import counters

SECONDS = 120.0  # only a guard against hangs
DEPTHS = {"verbs": 4}  # writes outstanding in a stream; perftest, beside which verbs is measured, has 128


def make_device(kind: str, interface: str = "127.0.0.1", heartbeat: float = 1.0, lost_after: float = 10.0) -> Device:
    """The device that the command line names."""
    return find_device(kind).for_job(interface=interface, heartbeat=heartbeat, lost_after=lost_after)


def counts() -> dict[str, float]:
    """What is reported of a round in addition to its time."""
    return {name: getattr(counters, name) for name in ("copies", "rpcs", "registrations")}


def since(earlier: dict[str, float]) -> dict[str, float]:
    """What was counted after ``earlier``."""
    return {name: value - earlier[name] for name, value in counts().items()}


def polled(wait: Callable[[float], object]) -> None:
    """Waits without ever sleeping: ``wait(seconds)`` again and again.

    Only to warm up. Two processes that wake each other up cannot answer within the time that a wait spins, so they
    would go on sleeping and waking; two that are awake stay awake.
    """
    end = time.monotonic() + SECONDS
    while True:
        try:
            wait(1e-6)
        except WaitTimeout:
            if time.monotonic() > end:
                raise
        else:
            return


class TransferEnd:
    """One end of a transfer: an inbox with a signal word after the payload, and a source of the same size."""

    def __init__(self, lines: Lines, device: Device, nbytes: int) -> None:
        self.word = -(-nbytes // 64) * 64  # a cache line of its own
        self.inbox = device.allocate(self.word + 64)
        self.payload = self.inbox.view(0, nbytes).buffer
        self.source = device.allocate(nbytes)
        told = lines.hello(f"{device.address.hex()} {self.inbox.remote().pack().hex()}").split()
        self.channel = device.connect(bytes.fromhex(told[0]))
        there = RemoteRegion.unpack(bytes.fromhex(told[1]))
        self.sent, self.there = self.source.view(), there.view(0, nbytes)
        self.there_word = there.view(self.word, 8)
        self.at = 0
        self.depth = DEPTHS.get(device.name, 2)

    def fill(self, round: int) -> None:
        """Puts the round's bytes into the source."""
        fill(self.sent.buffer, round)

    def wait(self, at_least: int) -> None:
        """Waits for the peer's signal."""
        self.inbox.wait(self.word, at_least, SECONDS, self.channel)

    def poll(self, at_least: int) -> None:
        """The same, always awake."""
        polled(lambda seconds: self.inbox.wait(self.word, at_least, seconds, self.channel))

    def step(self) -> Completion:
        """Writes the next payload and its signal."""
        self.at += 1
        return self.channel.write(self.sent, self.there, (self.there_word, self.at))

    def ping(self, count: int) -> None:
        """Writes, then waits for the answer."""
        write, wait, sent, there, word = self.channel.write, self.inbox.wait, self.sent, self.there, self.there_word
        offset, channel = self.word, self.channel
        for i in range(self.at + 1, self.at + count + 1):
            write(sent, there, (word, i))
            wait(offset, i, SECONDS, channel)
        self.at += count

    def pong(self, count: int) -> None:
        """Waits, then writes the answer."""
        write, wait, sent, there, word = self.channel.write, self.inbox.wait, self.sent, self.there, self.there_word
        offset, channel = self.word, self.channel
        for i in range(self.at + 1, self.at + count + 1):
            wait(offset, i, SECONDS, channel)
            write(sent, there, (word, i))
        self.at += count

    def warm_ping(self, count: int) -> None:
        """``ping``, always awake."""
        for _ in range(count):
            self.step()
            self.poll(self.at)

    def warm_pong(self, count: int) -> None:
        """``pong``, always awake."""
        for _ in range(count):
            self.poll(self.at + 1)
            self.step()

    def write(self, count: int) -> None:
        """Writes and waits for the completion, one after the other."""
        write, sent, there, word = self.channel.write, self.sent, self.there, self.there_word
        for i in range(self.at + 1, self.at + count + 1):
            write(sent, there, (word, i)).wait()
        self.at += count

    def warm_write(self, count: int) -> None:
        """``write``, always awake."""
        for _ in range(count):
            polled(self.step().wait)

    def copy(self, library: str, name: str) -> Callable[[int], None]:
        """What ``write`` does, by a copy and a flag in C."""
        copy_and_flag = ctypes.CDLL(library).copy_and_flag
        there, source = self.channel.map(self.there), self.source
        assert there is not None
        ends = ctypes.c_void_p(there.address), ctypes.c_void_p(source.address), ctypes.c_size_t(source.nbytes)
        flag = ctypes.c_void_p(there.address + self.word)

        def repeat(count: int) -> None:
            for i in range(self.at + 1, self.at + count + 1):
                copy_and_flag(name.encode(), *ends, flag, ctypes.c_uint64(i))
            self.at += count

        return repeat

    def stream(self, count: int, *, signals: bool = True) -> None:
        """Writes with some always on their way."""
        outstanding: deque[Completion] = deque()
        for left in range(count, 0, -1):
            if signals or left == 1:
                outstanding.append(self.step())
            else:
                self.at += 1
                outstanding.append(self.channel.write(self.sent, self.there))
            if len(outstanding) >= self.depth:
                outstanding.popleft().wait(SECONDS)
        while outstanding:
            outstanding.popleft().wait(SECONDS)

    def receive(self, count: int) -> None:
        """Waits for the last signal."""
        self.at += count
        self.wait(self.at)

    def warm_receive(self, count: int) -> None:
        """``receive``, always awake."""
        for _ in range(count):
            self.at += 1
            self.poll(self.at)


Part = Callable[[int], object]


def work(end: TransferEnd, role: str, mode: str) -> tuple[Part, Part]:
    """What an end repeats in a mode, and how it warms up."""
    if mode == "ping-pong":
        return (end.ping, end.warm_ping) if role == "initiator" else (end.pong, end.warm_pong)
    if mode == "both-ways" or (mode == "one-way" and role == "initiator"):
        return end.stream, end.stream
    if mode == "one-signal" and role == "initiator":
        silent = functools.partial(end.stream, signals=False)
        return silent, silent
    if role == "initiator":
        return end.write, end.warm_write
    return end.receive, end.receive if mode in ("passive-target", "one-signal") else end.warm_receive


def main(role: str, kind: str, nbytes: str, mode: str, interface: str, library: str = "") -> None:
    """Runs until its input ends."""
    lines = Lines()
    with make_device(kind, interface) as device:
        end = TransferEnd(lines, device, int(nbytes))
        repeat, warm = work(end, role, mode)
        for run in lines.runs():
            before = counts()
            end.fill(run.round)
            if run.word and role == "initiator":
                seconds = timed(run, end.copy(library, run.word))
            else:
                seconds = timed(run, repeat, warm)
            counted = since(before)
            if role == "target" or mode in ("ping-pong", "both-ways"):
                end.wait(end.at)
                check(end.payload, run.round)
            # The initiator's clock counts; both, where both send.
            lines.answer(seconds if role == "initiator" or mode == "both-ways" else 0.0, **counted)


if __name__ == "__main__":
    main(*sys.argv[1:])
