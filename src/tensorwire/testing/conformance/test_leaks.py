"""Nothing grows, however often a job allocates and connects."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import astuple, dataclass
from pathlib import Path

from tensorwire.device import Channel, Device, RemoteRegion
from tensorwire.testing.fixtures import FarPair, Pair
from tensorwire.testing.patterns import SECONDS
from tensorwire.testing.spec import DeviceSpec


@dataclass(frozen=True)
class Held:
    """What this process has: descriptors, memory that it shares (all that a device maps; the allocator's is private),
    and threads, native ones too."""

    descriptors: int
    mappings: int
    threads: int

    def grew_from(self, before: Held) -> bool:
        return any(now > then for now, then in zip(astuple(self), astuple(before), strict=True))


def held() -> Held:
    gc.collect()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return Held(
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        mappings=sum(fields[1].endswith("s") for fields in maps),
        threads=len(list(Path("/proc/self/task").iterdir())),
    )


def settle(before: Held) -> Held:
    """What is held a moment later: targets let go of channels after their initiators closed them, and a thread that was
    joined is still listed for a while."""
    end = time.monotonic() + SECONDS
    while (now := held()).grew_from(before) and time.monotonic() < end:
        os.sched_yield()
    return now


def check_flat(before: Held) -> None:
    now = settle(before)
    assert not now.grew_from(before), f"what is held grows: {before}, then {now}"


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
    check_flat(before)


def test_opening_and_closing_devices(spec: DeviceSpec) -> None:
    def use() -> None:
        with spec.make() as a, spec.make() as b, a.connect(b.address) as channel:
            channel.signal(b.allocate(8).remote().view(), 1).wait(SECONDS)

    for _ in range(3):
        use()
    before = held()
    for _ in range(20):
        use()
    check_flat(before)


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
    check_flat(before)


def test_allocating_and_closing_elsewhere(far: FarPair) -> None:
    for i in range(300):
        if i == 100:
            before = held()
        remote = far.peer.allocate(64)
        one_round(far.channel, far.device, remote)
        far.peer.call("close_region", remote.key)
    check_flat(before)
