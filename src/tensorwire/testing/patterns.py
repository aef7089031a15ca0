"""Byte patterns known to both sides of a test, which distinguish writes, and their checks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorwire.device import Channel, Completion, Device, Region, RemoteRegion, View
from tensorwire.errors import AuthenticationError, PeerLost, ProtocolError
from tensorwire.testing.patience import patient

SECONDS = patient(60.0)  # for waits that must end long before
# How a connection to a device that has gone fails: nobody listens, or by now somebody else has its port.
GONE = (PeerLost, AuthenticationError, ProtocolError)
SLOTS = 4  # of an exchange: enough for nobody to wait for credit
HEAD = 64  # the signal word's own line

Bytes = npt.NDArray[np.uint8]
Plan = list[tuple[int, int, int]]  # of payloads: signal value, offset, size


@functools.cache
def _base() -> Bytes:
    return np.random.default_rng(1).integers(0, 256, (18 << 20) + 8192, dtype=np.uint8)


def pattern(seed: int, nbytes: int) -> Bytes:
    """Bytes that tell one write from another, at every place."""
    start = seed * 61 % 8192
    return _base()[start : start + nbytes]


def noise(nbytes: int) -> Bytes:
    """Any number of bytes."""
    return np.resize(pattern(3, 1 << 20), nbytes)


def array(memory: Any) -> Bytes:
    """The bytes of a region or of mapped memory, writable if it is."""
    return np.frombuffer(memoryview(memory), np.uint8)


def filled(device: Device, nbytes: int) -> Region:
    """A region whose bytes are all 3."""
    region = device.allocate(nbytes)
    array(region)[:] = 3
    return region


def every_use(
    channel: Channel, mine: Region, remote: RemoteRegion, at: int, *, reads: bool = True
) -> list[Callable[[], object]]:
    """Each operation on the 8 bytes at ``at`` of ``remote``."""
    view = remote.view(at, 8)
    uses: list[Callable[[], object]] = [
        lambda: channel.write(mine.view(0, 8), view).wait(SECONDS),
        lambda: channel.signal(view, 77).wait(SECONDS),
    ]
    if channel.device.capabilities.atomics:
        uses += [lambda: channel.fetch_add(view, 77), lambda: channel.compare_swap(view, 0, 77)]
    if reads:
        uses.append(lambda: channel.read(mine.view(8, 8), view).wait(SECONDS))
    return uses


async def until_done(completion: Completion) -> None:
    """Awaits it, as a coroutine that can be a task."""
    await completion


def resident() -> int:
    """Bytes of memory that this process holds; 0 under AddressSanitizer, which holds what was freed."""
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def state(pid: int, thread: int) -> str:
    """What the kernel says of a thread: R runs, S sleeps, T was stopped, X has ended."""
    try:
        return Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def asleep(pid: int, thread: int | None = None) -> bool:
    """Whether a thread (the main one by default) of a process sleeps in the kernel."""
    return state(pid, thread or pid) == "S"


def until_asleep(pid: int, thread: int | None = None) -> None:
    """Returns when it does. Raises `ProcessLookupError` if it ends instead."""
    while (now := state(pid, thread or pid)) != "S":
        if now == "X":
            raise ProcessLookupError(f"thread {thread or pid} of process {pid} has ended")
        os.sched_yield()


def verify(region: Region, plan: Plan) -> int:
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


def exchange_bytes(nbytes: int) -> int:
    """The size of a region for ``exchange``."""
    return HEAD + SLOTS * nbytes


def exchange(device: Device, channel: Channel, mine: Region, theirs: RemoteRegion, nbytes: int, rounds: int) -> None:
    """One of two sides that send to each other at once; each checks every payload of the other.

    A payload lands in a slot that was checked before: it is sent when the one before it has come from the other side.
    """
    here = array(mine)
    sources = [device.allocate(nbytes) for _ in range(SLOTS)]
    sent: list[Completion] = []
    for i in range(1, rounds + 1):
        at = HEAD + i % SLOTS * nbytes
        source = sources[i % SLOTS]
        if i > SLOTS:
            sent[i - SLOTS - 1].wait(SECONDS)
        array(source)[:] = pattern(i, nbytes)
        sent.append(channel.write(source.view(), theirs.view(at, nbytes), (theirs.view(0, 8), i)))
        mine.wait(0, i, SECONDS, channel)
        assert np.array_equal(here[at : at + nbytes], pattern(i, nbytes)), f"payload {i} is torn"
    for completion in sent[-SLOTS:]:
        completion.wait(SECONDS)


def flood(channel: Channel, source: View, theirs: RemoteRegion, back: View, times: int) -> None:
    """Writes and reads a whole region many times over, and only then waits for any of it."""
    posted = []
    for _ in range(times):
        posted.append(channel.write(source, theirs.view()))
        posted.append(channel.read(back, theirs.view()))
    for completion in reversed(posted):
        completion.wait(SECONDS)


def contend(channel: Channel, words: RemoteRegion, rounds: int, name: int) -> tuple[int, list[int]]:
    """Adds 1 to the first word ``rounds`` times, and tries to put ``name`` into each of ``rounds`` words that hold 0.

    Returns how many of those it won, and what each addition said the word had been.
    """
    won, seen = 0, []
    for i in range(rounds):
        seen.append(channel.fetch_add(words.view(0, 8), 1))
        won += channel.compare_swap(words.view(8 + i * 8, 8), 0, name) == 0
    return won, seen
