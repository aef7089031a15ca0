"""close() at any moment, of anything, from any thread: everything ends, with a typed error or none."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import pytest

from tensorwire.device import Channel, Completion, Region, RemoteRegion
from tensorwire.errors import AuthenticationError, DeviceError, PeerLost, RegionClosed, RemoteAccessError
from tensorwire.testing.fixtures import FarPair, InThread, Pair
from tensorwire.testing.patterns import SECONDS, array, until_done
from tensorwire.testing.spec import DeviceSpec

NBYTES = 200_000
MOMENTS = range(6)  # seeds
ENDS = (PeerLost, RegionClosed, RemoteAccessError)


class Closable(Protocol):
    """A device, a channel, a region."""

    def close(self) -> None:
        """Idempotent."""


class Traffic:
    """Threads that write, read, count and wait on one channel until something ends them."""

    def __init__(self, pair: Pair, in_thread: InThread, chance: random.Random, *, reads: bool) -> None:
        self.pair = pair
        self.region = pair.target.allocate(NBYTES)
        self.remote: RemoteRegion = self.region.remote()
        self.guard = pair.target.allocate(NBYTES)
        self.mine: Region = pair.initiator.allocate(NBYTES)
        self.done = 0
        self.progress = threading.Condition()
        self.stop = threading.Event()
        self.ended: list[DeviceError] = []
        works: list[Callable[[], object]] = [self.write, self.signal, self.await_writes]
        if reads:
            works.append(self.read)
        if pair.initiator.capabilities.atomics:
            works.append(self.count)
        chance.shuffle(works)
        self.threads = [in_thread(self._until_end, work) for work in works]
        waits: list[Callable[[], object]] = [
            lambda: self.region.wait(NBYTES - 8, 2**63, SECONDS),
            lambda: self.mine.wait(NBYTES - 8, 2**63, SECONDS, pair.channel),
        ]
        self.waiters = [in_thread(self._until_end, wait) for wait in waits]

    def _until_end(self, work: Callable[[], object]) -> None:
        try:
            while not self.stop.is_set():
                work()
                with self.progress:
                    self.done += 1
                    self.progress.notify_all()
        except ENDS as error:
            self.ended.append(error)

    def after(self, operations: int) -> None:
        """Returns when so many rounds are done."""
        with self.progress:
            assert self.progress.wait_for(lambda: self.done >= operations, SECONDS)

    def write(self) -> None:
        """Several at once; the last is waited for."""
        channel, word = self.pair.channel, self.remote.view(0, 8)
        posted = [
            channel.write(self.mine.view(8, n), self.remote.view(8, n), (word, 1)) for n in (100_000, 0, 1, 70_001)
        ]
        posted[-1].wait(SECONDS)

    def read(self) -> None:
        """One."""
        self.pair.channel.read(self.mine.view(8, 90_001), self.remote.view(8, 90_001)).wait(SECONDS)

    def signal(self) -> None:
        """One."""
        self.pair.channel.signal(self.remote.view(0, 8), 2).wait(SECONDS)

    def count(self) -> None:
        """One atomic."""
        self.pair.channel.fetch_add(self.remote.view(NBYTES - 16, 8), 1)

    def await_writes(self) -> None:
        """Two, in asyncio."""

        async def both() -> None:
            await self.pair.channel.write(self.mine.view(8, 5), self.remote.view(8, 5))
            await self.pair.channel.write(self.mine.view(8, 80_000), self.remote.view(8, 80_000))

        asyncio.run(both())

    def join(self, threads: list[threading.Thread]) -> None:
        """They end by themselves."""
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("what", ["channel", "initiator", "target", "region", "source"])
def test_closing_in_the_middle(pair: Pair, in_thread: InThread, what: str, moment: int) -> None:
    chance = random.Random(f"{what} {moment}")
    reads = what != "region" or pair.target.capabilities.refuses_midway
    traffic = Traffic(pair, in_thread, chance, reads=reads)
    traffic.after(chance.choice([0, 1, 2, 5, 20]))
    ends: dict[str, Closable] = {
        "channel": pair.channel,
        "initiator": pair.initiator,
        "target": pair.target,
        "region": traffic.region,
        "source": traffic.mine,
    }
    twice = [in_thread(ends[what].close) for _ in range(2)]  # from two threads at once
    traffic.join(twice)
    if what in ("region", "source"):
        # The channel lives on, so only those end who need what was closed.
        with pair.target.allocate(8) as fresh:
            pair.channel.signal(fresh.remote().view(), 3).wait(SECONDS)
            assert fresh.load(0) == 3
        traffic.stop.set()
        pair.channel.close()
    elif what == "channel":
        pair.target.close()  # its own waits name no channel of ours
    traffic.join(traffic.threads)
    for device in (pair.initiator, pair.target):
        device.close()
    traffic.join(traffic.waiters)
    assert traffic.ended
    assert not array(traffic.guard).any()


@pytest.mark.parametrize("what", ["channel", "initiator"])
def test_two_close_at_once_while_a_write_is_awaited(spec: DeviceSpec, in_thread: InThread, what: str) -> None:
    for _ in range(20):
        with spec.make() as initiator, spec.make() as target:
            channel, source = initiator.connect(target.address), initiator.allocate(NBYTES)
            remote = target.allocate(NBYTES).remote()
            ready, ended = threading.Barrier(3), list[bool]()
            closable: Closable = channel if what == "channel" else initiator

            async def write_on(channel=channel, source=source, remote=remote, ready=ready) -> None:  # type: ignore[no-untyped-def]
                for number in range(10**9):
                    written = [channel.write(source.view(), remote.view()) for _ in range(3)]
                    if number == 3:
                        ready.wait(SECONDS)
                    await asyncio.gather(*map(until_done, written))

            def write(write_on=write_on, ended=ended) -> None:  # type: ignore[no-untyped-def]
                with pytest.raises(ENDS):
                    asyncio.run(write_on())
                ended.append(True)

            def close(closable=closable, channel=channel, ready=ready) -> None:  # type: ignore[no-untyped-def]
                ready.wait(SECONDS)
                closable.close()
                assert channel.lost

            for thread in [in_thread(write), in_thread(close), in_thread(close)]:
                thread.join(SECONDS)
            assert ended


def test_a_closed_channel_lets_go_of_its_memory_at_once(far: FarPair) -> None:
    """What was posted and not done fails, and then the memory is its owner's again."""
    remote = far.peer.allocate(4 << 20)
    far.channel.signal(remote.view(0, 8), 0).wait(SECONDS)
    source, back = bytearray(4 << 20), bytearray(4 << 20)
    posted: list[Completion] = []
    for _ in range(4):
        posted.append(far.channel.write(far.device.register(source).view(), remote.view()))
        posted.append(far.channel.read(far.device.register(back).view(), remote.view()))
    far.channel.close()
    for completion in posted:
        try:
            completion.wait(SECONDS)
        except PeerLost:
            pass
        assert completion.done
    del posted, completion
    source.append(0)  # a buffer that is still in use cannot grow
    back.append(0)


def test_closing_twice_and_in_any_order(spec: DeviceSpec) -> None:
    for order in ("cti", "cit", "itc", "tic", "ict", "tci"):
        initiator, target = spec.make(), spec.make()
        channel: Channel = initiator.connect(target.address)
        region = target.allocate(8)
        remote = region.remote()
        channel.signal(remote.view(), 1).wait(SECONDS)
        closing: dict[str, Closable] = {"c": channel, "t": target, "i": initiator}
        for each in order * 2:
            closing[each].close()
        assert region.closed
        assert array(region).view(np.uint64)[0] == 1  # what looks into it stays valid
        with pytest.raises(PeerLost):
            channel.signal(remote.view(), 2).wait(SECONDS)


def test_it_is_closed_once_either_of_two_closes_returns(spec: DeviceSpec, in_thread: InThread) -> None:
    with spec.make() as initiator, spec.make() as target:
        for _ in range(30):
            channel = initiator.connect(target.address)
            both, lost = threading.Barrier(2), list[bool]()

            def close(channel=channel, both=both, lost=lost) -> None:  # type: ignore[no-untyped-def]
                both.wait(SECONDS)
                channel.close()
                lost.append(channel.lost)

            for thread in [in_thread(close) for _ in range(2)]:
                thread.join(SECONDS)
            assert lost == [True, True]


def test_closing_while_others_connect(spec: DeviceSpec, in_thread: InThread) -> None:
    for moment in (0, 1, 3, 8):
        with spec.make() as initiator:
            target = spec.make()
            address, made = target.address, threading.Semaphore(0)

            def connect(device=initiator, address=address, made=made) -> None:  # type: ignore[no-untyped-def]
                with contextlib.suppress(PeerLost, AuthenticationError):  # hung up on within the handshake
                    while True:
                        device.connect(address, timeout=SECONDS).close()
                        made.release()

            threads = [in_thread(connect) for _ in range(3)]
            for _ in range(moment):
                assert made.acquire(timeout=SECONDS)
            target.close()
            for thread in threads:
                thread.join()
