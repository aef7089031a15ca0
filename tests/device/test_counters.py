"""Each counter rises when what it counts happens, and not otherwise."""

from __future__ import annotations

import pickle
import threading

import pytest

from tensorwire.errors import TensorwireError
from tensorwire.observe import Counters, counters, pickles_counted
from tensorwire.testing.fixtures import Pair
from tensorwire.testing.patterns import SECONDS


def test_transfers(pair: Pair) -> None:
    start = counters.snapshot()
    region, source = pair.target.allocate(100), pair.initiator.allocate(100)
    small = pair.initiator.register(bytearray(10))
    assert counters.since(start) == Counters(registrations=3)
    remote = region.remote()
    start = counters.snapshot()
    pair.channel.write(source.view(), remote.view()).wait(SECONDS)
    pair.channel.write(source.view(0, 50), remote.view(50, 50), (remote.view(0, 8), 1)).wait(SECONDS)
    pair.channel.read(small.view(), remote.view(0, 10)).wait(SECONDS)
    copied = pair.initiator.capabilities.maps  # tcp: the kernel's copies are not counted
    transfers = Counters(messages=3, bytes=160, copies=3 * copied, copied_bytes=160 * copied)
    assert counters.since(start) == transfers
    start = counters.snapshot()
    pair.channel.signal(remote.view(0, 8), 1).wait(SECONDS)
    pair.channel.fetch_add(remote.view(0, 8), 1)
    pair.channel.compare_swap(remote.view(0, 8), 0, 1)
    assert counters.since(start) == Counters(messages=3)


def test_what_arrived_was_counted(pair: Pair) -> None:
    """Who sees a step at the other end, and counts then, misses nothing of it."""
    region = pair.target.allocate(64)
    source, remote = pair.initiator.allocate(64), region.remote()
    start, steps = counters.snapshot(), 2000

    def write() -> None:
        for step in range(1, steps + 1):
            pair.channel.write(source.view(8, 56), remote.view(8, 56), (remote.view(0, 8), step))

    writer = threading.Thread(target=write)
    writer.start()
    short = []
    for step in range(1, steps + 1):
        region.wait(0, step, SECONDS)
        if counters.since(start).messages < step:
            short.append(step)
    writer.join()
    assert short == []


def test_what_is_refused_here_is_not_counted(pair: Pair) -> None:
    remote, source = pair.target.allocate(16).remote(), pair.initiator.allocate(16)
    start = counters.snapshot()
    for wrong in (
        lambda: pair.channel.write(source.view(0, 8), remote.view()),
        lambda: pair.channel.signal(remote.view(0, 8), -1),
        lambda: pair.channel.fetch_add(remote.view(), 1),
        lambda: pair.initiator.allocate(-1),
        lambda: pair.initiator.allocate(1 << 60),
        lambda: pair.initiator.register("text"),
    ):
        with pytest.raises(TensorwireError):
            wrong()
    assert counters.since(start) == Counters()


def test_no_transfer_pickles(pair: Pair) -> None:
    start = counters.snapshot()
    with pickles_counted() as counted:
        assert counted is counters
        remote, source = pair.target.allocate(16).remote(), pair.initiator.allocate(16)
        pair.channel.write(source.view(), remote.view(), (remote.view(0, 8), 1)).wait(SECONDS)
        assert counters.since(start).pickles == 0
        pickle.loads(pickle.dumps([1]))
        assert counters.since(start).pickles == 2
    pickle.dumps([1])
    assert counters.since(start).pickles == 2
