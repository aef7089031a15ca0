"""Pools: no two leases overlap, memory comes back once, and what is registered stays bounded."""

from __future__ import annotations

import bisect
import collections
import gc
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorwire.device import Device, LoopbackDevice
from tensorwire.edge import Lease, Pool
from tensorwire.edge.pool import ALIGNMENT, IDLE_LEASES, SLAB, block_nbytes
from tensorwire.errors import ArgumentError, OutOfMemory
from tensorwire.observe import counters
from tensorwire.testing import FaultyDevice

LIMIT = 256 << 20


@pytest.fixture
def device() -> Iterator[Device]:
    with LoopbackDevice() as made:
        yield made


@pytest.fixture
def pool(device: Device) -> Pool:
    return Pool(device, limit=LIMIT)


def address(lease: Lease) -> int:
    return lease.slab.region.address + lease.offset


@pytest.mark.long
def test_a_million_random_sizes(device: Device) -> None:
    """In bursts and lulls, from 1 byte to 8 MiB, dropped in any order.

    What is registered stays below three times the most that was ever asked for at once, and a slab a shared size.
    """
    pool, source = Pool(device, limit=1 << 40), random.Random(1)
    live: list[tuple[int, int, Lease]] = []  # by address
    asked = most_asked = most_registered = 0
    most_live = 40
    for i in range(1_000_000):
        if i % 10_000 == 0:
            most_live = source.choice((3, 40, 200))
        if i % 100 == 0:
            most_registered = max(most_registered, pool.registered_bytes)
        nbytes = int(2 ** (23 * source.random() ** 1.5))
        lease = pool.lease(nbytes)
        begin = address(lease)
        assert begin % ALIGNMENT == 0
        at = bisect.bisect(live, (begin,))
        assert at == 0 or live[at - 1][1] <= begin, "two leases overlap"
        assert at == len(live) or begin + nbytes <= live[at][0], "two leases overlap"
        live.insert(at, (begin, begin + nbytes, lease))
        asked += nbytes
        most_asked = max(most_asked, asked)
        while len(live) > most_live or source.random() < 0.48:
            begin, end, lease = live.pop(int(source.random() * len(live)))
            asked -= end - begin
            if not live:
                break
    classes = 44  # sizes of blocks that share a slab
    assert most_asked > 50 << 20
    assert most_registered <= 3 * most_asked + classes * SLAB
    assert pool.leased_bytes >= asked
    live.clear()
    del lease
    assert pool.leased_bytes == 0
    pool.trim()
    assert pool.registered_bytes == 0


def test_blocks_are_at_most_a_quarter_larger() -> None:
    sizes = [*range(4200), *(random.Random(2).randrange(2**40) for _ in range(2000)), *(2**k for k in range(40))]
    for nbytes in sizes:
        block = block_nbytes(nbytes)
        assert nbytes <= block <= max(ALIGNMENT, nbytes + max(ALIGNMENT, nbytes // 4))
        assert block % ALIGNMENT == 0
    assert len({block_nbytes(nbytes) for nbytes in range(1, SLAB // 4 + 1)}) == 44


class Model(RuleBasedStateMachine):
    """A pool against what its user sees, with a limit that is reached."""

    def __init__(self) -> None:
        super().__init__()
        self.device = LoopbackDevice()
        self.limit = 12 << 20
        self.pool = Pool(self.device, limit=self.limit)
        self.live: list[tuple[Lease, bytes]] = []
        self.views: list[tuple[memoryview, bytes]] = []

    @rule(size=st.one_of(st.integers(0, 300), st.integers(200_000, 300_000), st.integers(1 << 20, 5 << 20)))
    def lease(self, size: int) -> None:
        before = self.pool.registered_bytes, self.pool.leased_bytes
        try:
            lease = self.pool.lease(size)
        except OutOfMemory:
            assert (self.pool.registered_bytes, self.pool.leased_bytes) == before
            return
        pattern = bytes([len(self.live) % 255 + 1])
        lease.memory[:] = pattern * size
        self.live.append((lease, pattern))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), by=st.sampled_from(["drop", "release", "view"]))
    def end(self, data: st.DataObject, by: str) -> None:
        lease, pattern = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        if by == "view":
            self.views.append((lease.memory, pattern))
        if by == "release":
            lease.release()
            lease.release()

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def drop_view(self, data: st.DataObject) -> None:
        self.views.pop(data.draw(st.integers(0, len(self.views) - 1)))

    @rule()
    def trim(self) -> None:
        self.pool.trim()
        assert self.pool.registered_bytes <= self.limit

    @invariant()
    def nobody_wrote_there(self) -> None:
        for memory, pattern in [*((lease.memory, pattern) for lease, pattern in self.live), *self.views]:
            assert bytes(memory) == pattern * memory.nbytes

    @invariant()
    def it_is_counted(self) -> None:
        asked = sum(lease.nbytes for lease, _ in self.live) + sum(view.nbytes for view, _ in self.views)
        assert asked <= self.pool.leased_bytes <= self.pool.registered_bytes <= self.limit
        assert (self.pool.leased_bytes == 0) == (not self.live and not self.views)

    def teardown(self) -> None:
        self.live.clear()
        self.views.clear()
        self.pool.trim()
        assert self.pool.registered_bytes == self.pool.leased_bytes == 0
        self.device.close()


TestModel = Model.TestCase
TestModel.settings = settings(derandomize=True, database=None, deadline=None, max_examples=40, stateful_step_count=40)


def test_no_registration_in_steady_state(pool: Pool) -> None:
    sizes = [1, 1000, 70_000, 300_000, 1 << 20, 3_000_000, 0]
    for size in sizes:
        pool.lease(size)
    before = counters.snapshot()
    for i in range(3 * IDLE_LEASES):
        pool.lease(sizes[i % len(sizes)])
    assert counters.since(before).registrations == 0


def test_a_lease_for_half_a_slab_takes_a_larger_one_that_is_free(pool: Pool) -> None:
    pool.lease(4 << 20)
    before = counters.snapshot()
    pool.lease(2 << 20)
    assert counters.since(before).registrations == 0
    pool.lease(1 << 20)
    assert counters.since(before).registrations == 1


def test_slabs_that_nobody_wants_are_closed(pool: Pool) -> None:
    big = pool.lease(8 << 20)
    region = big.slab.region
    del big
    for _ in range(IDLE_LEASES // 2):
        pool.lease(8)
    assert not region.closed
    for _ in range(IDLE_LEASES):
        pool.lease(8)
    assert region.closed
    assert pool.registered_bytes == SLAB


def test_above_the_limit_nothing_changes(device: Device) -> None:
    pool = Pool(device, limit=3 << 20)
    kept = pool.lease(1 << 20)
    pool.lease(2 << 20)
    before = pool.registered_bytes, counters.snapshot()
    for size in (3 << 20, 1 << 30, 2**70):
        with pytest.raises(OutOfMemory, match="release tensors earlier, or raise its limit"):
            pool.lease(size)
    assert (pool.registered_bytes, counters.since(before[1]).registrations) == (before[0], 0)
    del kept
    whole = pool.lease(3 << 20)  # closes what is free
    assert pool.registered_bytes == 3 << 20
    assert whole.memory.nbytes == 3 << 20


def test_memory_that_the_device_refuses() -> None:
    with LoopbackDevice() as inner:
        pool = Pool(FaultyDevice(inner, refuse_memory_at=1), limit=LIMIT)
        with pytest.raises(OutOfMemory, match="injected"):
            pool.lease(8)
        assert pool.registered_bytes == pool.leased_bytes == 0
        assert pool.lease(8).memory.nbytes == 8


def test_bad_arguments(device: Device) -> None:
    with pytest.raises(ArgumentError, match="1 byte or more"):
        Pool(device, limit=0)
    with pytest.raises(ArgumentError, match="0 bytes or more"):
        Pool(device, limit=1).lease(-1)


def test_a_released_lease_shows_nothing(pool: Pool) -> None:
    with pool.lease(100) as lease:
        view = lease.memory
    with pytest.raises(ArgumentError, match="was released"):
        _ = lease.memory
    assert pool.leased_bytes == block_nbytes(100)  # the view
    del view
    assert pool.leased_bytes == 0


def test_leases_of_several_threads(pool: Pool) -> None:
    """Some are dropped by other threads, some by the garbage collector."""
    handed: collections.deque[Lease] = collections.deque()
    wrong: list[int] = []

    def work(number: int) -> None:
        source = random.Random(number)
        mine: list[Lease] = []
        for i in range(3000):
            lease = pool.lease(source.choice((8, 500, 40_000)))
            array = np.frombuffer(lease.memory, np.uint8)
            array[:] = number
            mine.append(lease)
            if i % 7 == 0:
                handed.append(mine.pop(0))
            if i % 11 == 0 and len(handed) > 20:
                handed.popleft()
            if len(mine) > 20:
                lease = mine.pop(source.randrange(20))
                if not np.all(np.frombuffer(lease.memory, np.uint8) == number):
                    wrong.append(i)
                if i % 13 == 0:
                    ring: list[object] = [lease]
                    ring.append(ring)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    handed.clear()
    gc.collect()
    assert pool.leased_bytes == 0
