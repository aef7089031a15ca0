"""Nothing grows, however often a job allocates and connects."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

from tensorwire.device import Channel, Device, RemoteRegion
from tensorwire.testing.fixtures import FarPair, Pair
from tensorwire.testing.patterns import SECONDS
from tensorwire.testing.spec import Spec

ALLOWED = 6  # mappings that come and go with the allocator


def held() -> tuple[int, int]:
    """Descriptors and mappings of this process."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), Path("/proc/self/maps").read_text().count("\n")


def check_flat(before: tuple[int, int], after: tuple[int, int]) -> None:
    assert after[0] <= before[0], "descriptors grow"
    assert after[1] <= before[1] + ALLOWED, "mappings grow"


def settle(before: tuple[int, int]) -> tuple[int, int]:
    """What is held when targets have let go of channels, a moment after their initiators closed them."""
    end = time.monotonic() + SECONDS
    while (now := held())[0] > before[0] and time.monotonic() < end:
        os.sched_yield()
    return now


def test_connecting_and_closing(pair: Pair) -> None:
    region = pair.target.allocate(8)

    def connect() -> None:
        with pair.initiator.connect(pair.target.address) as channel:
            channel.signal(region.remote().view(), 1).wait(SECONDS)

    pair.channel.signal(region.remote().view(), 1).wait(SECONDS)
    before = held()
    for _ in range(10):
        connect()
    before = settle(before)
    for _ in range(100):
        connect()
    check_flat(before, settle(before))


def test_opening_and_closing_devices(spec: Spec) -> None:
    def use() -> None:
        with spec.make() as a, spec.make() as b, a.connect(b.address) as channel:
            channel.signal(b.allocate(8).remote().view(), 1).wait(SECONDS)

    for _ in range(3):
        use()
    before = held()
    for _ in range(20):
        use()
    check_flat(before, held())


def one_round(channel: Channel, device: Device, remote: RemoteRegion) -> None:
    with device.allocate(64) as source:
        channel.write(source.view(), remote.view(), (remote.view(0, 8), 1)).wait(SECONDS)


def test_allocating_and_closing(pair: Pair) -> None:
    for i in range(1100):
        if i == 100:
            before = held()
        with pair.target.allocate(64) as region:
            region.remote("read")
            one_round(pair.channel, pair.initiator, region.remote())
    check_flat(before, held())


def test_allocating_and_closing_elsewhere(far: FarPair) -> None:
    for i in range(300):
        if i == 100:
            before = held()
        remote = far.peer.allocate(64)
        one_round(far.channel, far.device, remote)
        far.peer.call("close_region", remote.key)
    check_flat(before, held())
