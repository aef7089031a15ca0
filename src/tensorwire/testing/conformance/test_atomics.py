"""Atomics: right alone, and lossless among threads, channels and processes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tensorwire.device import Channel, RemoteRegion
from tensorwire.testing.fixtures import FarPair, InThread, Pair
from tensorwire.testing.patterns import array, contend
from tensorwire.testing.peer import Peer

ROUNDS = 50


def need_atomics(pair: Pair | FarPair) -> None:
    if not pair.channel.device.capabilities.atomics:
        pytest.skip("this device has no atomics")


def check_contest(results: list[tuple[int, list[int]]], words: list[int], names: range) -> None:
    """No addition was lost or seen twice; each of the other words was won once, by the name it holds."""
    seen = sorted(itertools.chain.from_iterable(old for _, old in results))
    assert seen == list(range(ROUNDS * len(results)))
    assert words[0] == ROUNDS * len(results)
    assert sum(won for won, _ in results) == ROUNDS
    for name, (won, _) in zip(names, results, strict=True):
        assert words[1:].count(name) == won


def test_fetch_add_and_compare_swap(pair: Pair) -> None:
    need_atomics(pair)
    region = pair.target.allocate(32)
    word = region.remote().view(16, 8)
    assert [pair.channel.fetch_add(word, n) for n in (5, -2, 2**63, 2**63)] == [0, 5, 3, 3 + 2**63]
    assert pair.channel.compare_swap(word, 99, 7) == 3  # not expected: unchanged
    assert pair.channel.compare_swap(word, 3, 2**64 - 1) == 3
    assert pair.channel.fetch_add(word, 1) == 2**64 - 1
    assert array(region).view(np.uint64).tolist() == [0, 0, 0, 0]


def test_an_atomic_wakes_who_waits_for_its_word(pair: Pair, in_thread: InThread) -> None:
    need_atomics(pair)
    region = pair.target.allocate(16)
    thread = in_thread(lambda: region.wait(8, 3, 60.0))
    for _ in range(3):
        pair.channel.fetch_add(region.remote().view(8, 8), 1)
    thread.join()


def test_threads_and_channels_of_one_process(pair: Pair, in_thread: InThread) -> None:
    need_atomics(pair)
    region = pair.target.allocate(8 + ROUNDS * 8)
    remote, names = region.remote(), range(1, 7)
    results: dict[int, tuple[int, list[int]]] = {}

    def enter(channel: Channel, name: int) -> None:
        results[name] = contend(channel, remote, ROUNDS, name)

    with pair.initiator.connect(pair.target.address) as other:
        threads = [in_thread(enter, (pair.channel, other)[n % 2], n) for n in names]
        for thread in threads:
            thread.join()
    words = array(region).view(np.uint64).tolist()
    check_contest([results[name] for name in names], words, names)


def test_processes(far: FarPair) -> None:
    need_atomics(far)
    region = far.device.allocate(8 + ROUNDS * 8)
    remote: RemoteRegion = region.remote()
    with Peer(far.spec) as another, far.spec.make() as third, third.connect(far.device.address) as channel:
        peers = [far.peer, another]
        for peer in peers:
            peer.call("connect", far.device.address)
        for name, peer in enumerate(peers, 1):
            peer.start("contend", remote, ROUNDS, name)
        own = contend(channel, remote, ROUNDS, 3)
        results = [*(peer.finish() for peer in peers), own]
    check_contest(results, array(region).view(np.uint64).tolist(), range(1, 4))


def test_several_channels_of_one_initiator(far: FarPair) -> None:
    need_atomics(far)
    remote = far.peer.allocate(16)
    with far.device.connect(far.peer.address) as other:
        for _ in range(100):
            far.channel.fetch_add(remote.view(8, 8), 1)
            other.fetch_add(remote.view(8, 8), 1)
    assert far.channel.fetch_add(remote.view(8, 8), 0) == 200
