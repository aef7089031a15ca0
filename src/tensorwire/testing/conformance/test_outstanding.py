"""Thousands of operations at once: a full channel makes its user wait, and nothing grows without a bound."""

from __future__ import annotations

import os
import time
from collections import deque

import numpy as np
import pytest

from tensorwire.device import Completion
from tensorwire.errors import RemoteAccessError
from tensorwire.testing.fixtures import FarPair, InThread, Pair
from tensorwire.testing.patterns import SECONDS, array, asleep, resident

OPERATIONS = 12_000
MOST_OUTSTANDING = 8192  # of one channel
MOST_GROWTH = 48 << 20  # bytes, of this process
LONGEST_STOP = 5.0  # seconds: a peer that is stopped for 10 is lost


class Poster:
    """Posts, and keeps count of what was posted and is not done."""

    def __init__(self) -> None:
        self.posted = 0
        self.most = 0
        self._open: deque[Completion] = deque()

    def add(self, completion: Completion) -> None:
        """One more."""
        self.posted += 1
        self._open.append(completion)
        while self._open and self._open[0].done:
            self._open.popleft().wait(SECONDS)
        self.most = max(self.most, len(self._open))

    def finish(self) -> None:
        """Waits for all."""
        while self._open:
            self._open.popleft().wait(SECONDS)


def test_a_stopped_peer_stops_who_sends_to_it(far: FarPair, in_thread: InThread) -> None:
    remote = far.peer.allocate(64)
    far.channel.signal(remote.view(8, 8), 0).wait(SECONDS)
    far.peer.stop()
    poster, before = Poster(), resident()

    def post() -> None:
        for i in range(1, OPERATIONS + 1):
            poster.add(far.channel.signal(remote.view(8, 8), i))
        poster.finish()

    thread = in_thread(post)
    seen, end = -1, time.monotonic() + LONGEST_STOP
    while (
        thread.is_alive()
        and time.monotonic() < end
        and not (asleep(os.getpid(), thread.native_id) and poster.posted == seen)
    ):
        seen = poster.posted
        thread.join(0.01)
    grown = resident() - before
    far.peer.resume()
    thread.join()
    assert poster.posted == OPERATIONS
    assert poster.most <= MOST_OUTSTANDING
    assert grown < MOST_GROWTH
    assert far.peer.call("content", remote.key, 8, 8) == OPERATIONS.to_bytes(8, "little")


def test_large_writes_to_a_stopped_peer_are_not_copied(far: FarPair) -> None:
    nbytes, count = 1 << 20, 200
    remote, source = far.peer.allocate(nbytes), far.device.allocate(nbytes)
    array(source)[:] = 9
    far.channel.signal(remote.view(0, 8), 0).wait(SECONDS)
    before = resident()
    far.peer.stop()
    completions = [far.channel.write(source.view(), remote.view()) for _ in range(count)]
    grown = resident() - before
    far.peer.resume()
    for completion in completions:
        completion.wait(SECONDS)
    assert grown < MOST_GROWTH
    assert far.peer.call("content", remote.key, 0, nbytes) == bytes([9]) * nbytes


def test_operations_of_every_kind_complete_in_any_order_of_asking(pair: Pair) -> None:
    count = 3000
    region = pair.target.allocate(8 + count)
    source, back, remote = pair.initiator.allocate(count), pair.initiator.allocate(count), region.remote()
    array(source)[:] = np.arange(count) % 251 + 1
    posted = []
    for i in range(count):
        posted.append(pair.channel.write(source.view(i, 1), remote.view(8 + i, 1), (remote.view(0, 8), i + 1)))
        posted.append(pair.channel.read(back.view(i, 1), remote.view(8 + i, 1)))
    for i in np.random.default_rng(5).permutation(len(posted)):
        posted[i].wait(SECONDS)
    assert np.array_equal(array(back), array(source))
    assert np.array_equal(array(region)[8:], array(source))
    assert region.load(0) == count


def test_memory_stays_flat_over_many_operations(pair: Pair) -> None:
    region, source = pair.target.allocate(64), pair.initiator.allocate(64)
    remote, poster = region.remote(), Poster()

    def use(times: int) -> None:
        for i in range(times):
            poster.add(pair.channel.write(source.view(), remote.view(), (remote.view(0, 8), i)))
        poster.finish()

    use(2000)
    before = resident()
    use(8000)
    assert resident() - before < 4 << 20


def test_refusals_in_between_hit_only_themselves(pair: Pair) -> None:
    count = 600
    region, source = pair.target.allocate(8 * count), pair.initiator.allocate(8 * count)
    array(source).view(np.uint64)[:] = np.arange(1, count + 1)
    remote, readable = region.remote(), region.remote("read")
    posted = [
        pair.channel.write(source.view(8 * i, 8), (readable if i % 3 == 1 else remote).view(8 * i, 8))
        for i in range(count)
    ]
    for i in reversed(range(count)):
        if i % 3 == 1:
            with pytest.raises(RemoteAccessError):
                posted[i].wait(SECONDS)
        else:
            posted[i].wait(SECONDS)
    want = np.where(np.arange(count) % 3 == 1, 0, np.arange(1, count + 1)).astype(np.uint64)
    assert np.array_equal(array(region).view(np.uint64), want)
