"""Both ways at once, over several channels, from several threads."""

from __future__ import annotations

import numpy as np
import pytest

from tensorwire.device import Region, RemoteRegion
from tensorwire.testing.fixtures import FarPair, InThread, Pair
from tensorwire.testing.patterns import SECONDS, array, exchange, exchange_bytes, flood, pattern

LARGE = 4 << 20


@pytest.mark.parametrize("nbytes", [1, 4097, 300_001])
def test_two_processes_send_to_each_other(far: FarPair, nbytes: int) -> None:
    rounds = 40
    mine, theirs = far.device.allocate(exchange_bytes(nbytes)), far.peer.allocate(exchange_bytes(nbytes))
    far.peer.call("connect", far.device.address)
    far.peer.start("exchange", theirs.key, mine.remote(), nbytes, rounds)
    exchange(far.device, far.channel, mine, theirs, nbytes, rounds)
    far.peer.finish()


def test_large_transfers_cross_in_flight(far: FarPair) -> None:
    """Neither side waits before it has posted everything: each must take in while it sends."""
    mine, theirs = far.device.allocate(LARGE), far.peer.allocate(LARGE)
    source, back = far.device.allocate(LARGE), far.device.allocate(LARGE)
    array(source)[:] = 3
    far.peer.call("connect", far.device.address)
    far.peer.start("flood", mine.remote(), 4, 8)
    flood(far.channel, source.view(), theirs, back.view(), 8)
    assert far.peer.finish() == bytes([4]) * LARGE
    assert np.all(array(back) == 3)
    assert np.all(array(mine) == 4)
    assert far.peer.call("content", theirs.key, 0, LARGE) == bytes([3]) * LARGE


def test_both_devices_of_one_process_send(pair: Pair, in_thread: InThread) -> None:
    nbytes, rounds = 70_000, 40
    ends = [device.allocate(exchange_bytes(nbytes)) for device in (pair.initiator, pair.target)]
    shown = [region.remote() for region in ends]
    with pair.target.connect(pair.initiator.address) as back:
        thread = in_thread(lambda: exchange(pair.target, back, ends[1], shown[0], nbytes, rounds))
        exchange(pair.initiator, pair.channel, ends[0], shown[1], nbytes, rounds)
        thread.join()


def test_many_threads_use_one_channel(pair: Pair, in_thread: InThread) -> None:
    region, source = pair.target.allocate(8 << 16), pair.initiator.allocate(8 << 16)
    array(source)[:] = np.repeat(np.arange(8, dtype=np.uint8), 1 << 16)
    remote = region.remote()

    def use(i: int) -> None:
        at = i << 16
        back = pair.initiator.allocate(1 << 16)
        for _ in range(20):
            pair.channel.write(source.view(at, 1 << 16), remote.view(at, 1 << 16))
            pair.channel.read(back.view(), remote.view(at, 1 << 16)).wait(SECONDS)
            assert np.all(array(back) == i)

    for thread in [in_thread(use, i) for i in range(8)]:
        thread.join()
    assert np.array_equal(array(region), array(source))


def test_channels_do_not_mix(far: FarPair, in_thread: InThread) -> None:
    """Every thread has a channel, and a part of one region, of its own."""
    nbytes, rounds, count = 20_011, 20, 4
    remote = far.peer.allocate(count * nbytes + 8)

    def use(n: int) -> None:
        source, back = far.device.allocate(nbytes), far.device.allocate(nbytes)
        there = remote.view(n * nbytes, nbytes)
        with far.device.connect(far.peer.address) as channel:
            for i in range(rounds):
                array(source)[:] = pattern(n * rounds + i, nbytes)
                channel.write(source.view(), there)
                channel.read(back.view(), there).wait(SECONDS)
                assert np.array_equal(array(back), array(source))

    for thread in [in_thread(use, n) for n in range(count)]:
        thread.join()
    content = far.peer.call("content", remote.key, 0, count * nbytes)
    want = b"".join(pattern((n + 1) * rounds - 1, nbytes).tobytes() for n in range(count))
    assert content == want


def test_one_region_for_several_initiators(far: FarPair) -> None:
    """Everyone reads what everyone wrote."""
    shared = far.device.allocate(3 * 4096)
    remote: RemoteRegion = shared.remote()
    parts: list[Region] = []
    with far.spec.make() as second, far.spec.make() as third:
        devices = [second, third]
        channels = [device.connect(far.device.address) for device in devices]
        for n, (device, channel) in enumerate(zip(devices, channels, strict=True)):
            part = device.allocate(4096)
            array(part)[:] = n + 1
            parts.append(part)
            channel.write(part.view(), remote.view(n * 4096, 4096)).wait(SECONDS)
        for device, channel in zip(devices, channels, strict=True):
            back = device.allocate(3 * 4096)
            channel.read(back.view(), remote.view()).wait(SECONDS)
            assert np.array_equal(array(back), np.repeat(np.array([1, 2, 0], np.uint8), 4096))
