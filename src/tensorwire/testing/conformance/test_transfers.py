"""Every size, offset and operation arrives byte by byte, and nothing beside it changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorwire.device import Device
from tensorwire.errors import ArgumentError
from tensorwire.testing.fixtures import SEEDED, FarPair, Pair
from tensorwire.testing.patterns import SECONDS, array, noise

SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 4095, 4096, 4097]
LARGEST = 64 << 20
GUARD = 4096
GIB = 1 << 30


def shared_kib(*pids: int) -> int:
    """What these processes have touched of shared memory."""
    status = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    return sum(int(text.partition("RssShmem:")[2].split()[0]) for text in status)


@pytest.mark.parametrize("nbytes", SIZES)
def test_write_and_read_move_exactly_their_bytes(pair: Pair, nbytes: int) -> None:
    region, source, back = (d.allocate(3 * 4200) for d in (pair.target, pair.initiator, pair.initiator))
    remote = region.remote()
    array(source)[:] = noise(len(source))
    for at in (0, 1, 8, 4100):
        array(region)[:] = array(back)[:] = 0xEE
        pair.channel.write(source.view(5, nbytes), remote.view(at, nbytes)).wait(SECONDS)
        pair.channel.read(back.view(at + 1, nbytes), remote.view(at, nbytes)).wait(SECONDS)
        for got, start in ((array(region), at), (array(back), at + 1)):
            want = np.full(len(got), 0xEE, np.uint8)
            want[start : start + nbytes] = array(source)[5 : 5 + nbytes]
            assert np.array_equal(got, want)


def test_any_size_at_any_offset(pair: Pair) -> None:
    room = LARGEST + 2 * GUARD
    region, source = pair.target.allocate(room), pair.initiator.allocate(room)
    remote, here, there = region.remote(), array(source), array(region)
    here[:] = noise(room)
    sizes = st.one_of(st.integers(0, 1 << 16), st.integers(0, 1 << 22), st.integers(15 << 20, LARGEST))

    @settings(SEEDED, max_examples=25)
    @given(nbytes=sizes, at=st.integers(0, GUARD), start=st.integers(0, GUARD), seed=st.integers(1, 255))
    def check(nbytes: int, at: int, start: int, seed: int) -> None:
        span = there[: GUARD + at + nbytes + GUARD]
        span[:] = seed
        at += GUARD
        pair.channel.write(source.view(start, nbytes), remote.view(at, nbytes)).wait(SECONDS)
        assert np.array_equal(span[at : at + nbytes], here[start : start + nbytes])
        assert np.all(span[:at] == seed)
        assert np.all(span[at + nbytes :] == seed)

    check()


def test_sizes_into_another_process(far: FarPair) -> None:
    remote, source, back = far.peer.allocate(20_000), far.device.allocate(20_000), far.device.allocate(20_000)
    array(source)[:] = noise(20_000)
    for nbytes in SIZES:
        far.peer.call("fill", remote.key, 0, b"\xee" * 20_000)
        far.channel.write(source.view(1, nbytes), remote.view(4103, nbytes)).wait(SECONDS)
        want = b"\xee" * 4103 + bytes(source.view(1, nbytes).buffer) + b"\xee" * (20_000 - 4103 - nbytes)
        assert far.peer.call("content", remote.key, 0, 20_000) == want
        far.channel.read(back.view(), remote.view()).wait(SECONDS)
        assert bytes(back.view().buffer) == want


def need_sparse(device: Device) -> None:
    if not device.capabilities.sparse:
        pytest.skip("this device pins every page of a region")


def test_offsets_past_four_gib(pair: Pair) -> None:
    need_sparse(pair.target)
    region = pair.target.allocate(6 * GIB, reserve=False)
    source, back, remote = pair.initiator.allocate(10_000), pair.initiator.allocate(10_000), region.remote()
    array(source)[:] = noise(10_000)
    for at in (4 * GIB - 5000, 4 * GIB + 3, 6 * GIB - 10_000):
        pair.channel.write(source.view(), remote.view(at, 10_000), (remote.view(5 * GIB, 8), at)).wait(SECONDS)
        region.wait(5 * GIB, at, SECONDS)
        assert region.load(5 * GIB) == at
        assert np.array_equal(array(region)[at : at + 10_000], array(source))
        pair.channel.read(back.view(), remote.view(at, 10_000)).wait(SECONDS)
        assert np.array_equal(array(back), array(source))
    assert not any(bytes(region.view(at % (4 * GIB), 8).buffer) != bytes(8) for at in (5 * GIB, 6 * GIB - 10_000))


def test_a_sparse_region_of_another_process_stays_sparse(far: FarPair) -> None:
    need_sparse(far.device)
    remote, source = far.peer.allocate(5 * GIB, reserve=False), far.device.allocate(8)
    array(source)[:] = 9
    before = shared_kib(os.getpid(), far.peer.pid)
    far.channel.write(source.view(), remote.view(5 * GIB - 8, 8)).wait(SECONDS)
    assert far.peer.call("content", remote.key, 5 * GIB - 8, 8) == b"\x09" * 8
    assert shared_kib(os.getpid(), far.peer.pid) - before < 1 << 20, "mapping a sparse region filled it"


def test_registered_memory_is_a_source_and_a_destination(pair: Pair) -> None:
    region = pair.target.allocate(12_000)
    mine = np.arange(3000, dtype=np.float32)
    array(region)[:] = 1
    pair.channel.write(pair.initiator.register(mine).view(), region.remote().view()).wait(SECONDS)
    assert np.array_equal(array(region).view(np.float32), mine)
    back = bytearray(12_000)
    pair.channel.read(pair.initiator.register(back).view(), region.remote().view()).wait(SECONDS)
    assert np.array_equal(np.frombuffer(back, np.float32), mine)
    constant = pair.initiator.register(bytes(range(100)))
    pair.channel.write(constant.view(), region.remote().view(50, 100)).wait(SECONDS)
    assert bytes(region.view(50, 100).buffer) == bytes(range(100))


def test_a_peer_writes_into_registered_memory_where_the_device_says_so(pair: Pair) -> None:
    mine = np.zeros(1000, np.uint8)
    region = pair.target.register(mine)
    if not pair.target.capabilities.shares_registered:
        with pytest.raises(NotImplementedError):
            region.remote()
        return
    source = pair.initiator.register(noise(500))
    pair.channel.write(source.view(), region.remote().view(300, 500)).wait(SECONDS)
    assert np.array_equal(mine[300:800], noise(500))
    assert not mine[:300].any()
    assert not mine[800:].any()


def test_signals_alone(pair: Pair) -> None:
    region = pair.target.allocate(24)
    for value in (1, 2, 2**32, 2**64 - 1):
        pair.channel.signal(region.remote().view(8, 8), value).wait(SECONDS)
        region.wait(8, value, SECONDS)
        assert array(region).view(np.uint64).tolist() == [0, value, 0]


def test_a_write_of_nothing_still_signals(pair: Pair) -> None:
    region, source = pair.target.allocate(8), pair.initiator.allocate(0)
    empty = pair.target.allocate(0)
    pair.channel.write(source.view(), empty.remote().view(), (region.remote().view(), 3)).wait(SECONDS)
    assert region.load(0) == 3
    assert np.from_dlpack(source).shape == (0,)


def test_mapped_memory_is_the_peers_own(pair: Pair) -> None:
    region = pair.target.allocate(100)
    mapped = pair.channel.map(region.remote().view())
    if not pair.initiator.capabilities.maps:
        assert mapped is None
        return
    assert mapped is not None
    array(mapped)[:] = 7
    assert np.all(array(region) == 7)
    honest = pair.channel.map(region.remote("read").view())
    assert honest is not None
    assert not honest.writable
    assert not array(honest).flags.writeable
    array(region)[3] = 9
    assert array(honest)[3] == 9


def test_sizes_and_ranges_are_checked_before_anything_changes(pair: Pair) -> None:
    region, source = pair.target.allocate(64), pair.initiator.allocate(64)
    array(source)[:] = 1
    remote = region.remote()
    word = remote.view(0, 8)
    wrong: list[Callable[[], object]] = [
        lambda: pair.channel.write(source.view(0, 9), remote.view(0, 8)),
        lambda: pair.channel.read(source.view(0, 8), remote.view(0, 9)),
        lambda: pair.channel.write(source.view(), remote.view(), (remote.view(4, 8), 1)),
        lambda: pair.channel.write(source.view(), remote.view(), (remote.view(0, 4), 1)),
        lambda: pair.channel.write(source.view(), remote.view(), (word, -1)),
        lambda: pair.channel.write(source.view(), remote.view(), (word, 2**64)),
        lambda: pair.channel.signal(remote.view(1, 8), 1),
        lambda: pair.channel.signal(remote.view(), 1),
        lambda: pair.channel.signal(word, 2**64),
        lambda: pair.channel.read(pair.initiator.register(bytes(8)).view(), word),
        lambda: source.view(60, 5),
        lambda: source.view(-1, 5),
        lambda: source.view(65),
        lambda: source.view(0, -1),
        lambda: remote.view(60, 5),
        lambda: remote.view(65),
        lambda: region.wait(4, 1, SECONDS),
        lambda: region.wait(64, 1, SECONDS),
        lambda: region.wait(-8, 1, SECONDS),
        lambda: region.wait(0, 2**64, SECONDS),
        lambda: region.remote("execute"),  # type: ignore[arg-type]
        lambda: pair.initiator.register(bytes(8)).remote("write"),
        lambda: pair.initiator.allocate(8, alignment=3),
        lambda: pair.initiator.allocate(8, alignment=8192),
        lambda: pair.initiator.allocate(-1),
        lambda: pair.initiator.register(np.zeros((4, 4))[:, ::2]),
        lambda: pair.initiator.register(memoryview(bytes(8))[::2]),
        lambda: pair.initiator.register(np.array([object()])),
        lambda: pair.initiator.register("text"),
        lambda: pair.initiator.register(None),
    ]
    if pair.initiator.capabilities.atomics:
        wrong += [
            lambda: pair.channel.fetch_add(remote.view(4, 8), 1),
            lambda: pair.channel.compare_swap(remote.view(0, 16), 0, 1),
            lambda: pair.channel.compare_swap(word, -1, 1),
        ]
    for each in wrong:
        with pytest.raises(ArgumentError):
            each()
    assert not array(region).any()
    assert np.all(array(source) == 1)
