"""Killed and stopped peers: every kind of waiter wakes with `PeerLost`, which names the peer; nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.harness.forked import LOST_AFTER, NEVER, Forked, quick, receive, send

from tensorwire.device import Channel, Completion, Device, Region, RemoteRegion
from tensorwire.errors import ArgumentError, PeerLost, WaitTimeout
from tensorwire.testing.patterns import SECONDS, array, until_asleep

InThread = Callable[[Callable[[], object]], threading.Thread]
BIG = 64 << 20  # more than all sockets on the way hold


def serve(kind: str, address: bytes, nbytes: int, pipe: socket.socket) -> None:
    """The peer: connects back, shows a region, and waits for its end."""
    device = quick(kind, lost_after=NEVER)
    channel = device.connect(address)
    region = device.allocate(nbytes, reserve=False)
    send(pipe, (device.address, region.remote().pack()))
    receive(pipe)
    channel.close()


@dataclass
class Doomed:
    """A peer, a channel to it, and a region of this process that it could write."""

    kind: str
    peer: Forked
    device: Device
    channel: Channel
    remote: RemoteRegion
    region: Region

    def end(self, how: str) -> None:
        if how == "killed":
            self.peer.kill()
        else:
            self.peer.stop()

    @property
    def name(self) -> str:
        return f"process {self.peer.pid}" if self.kind == "shm" else "127.0.0.1:"


@pytest.fixture(params=["killed", "stopped"])
def how(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def doomed(far_kind: str, request: pytest.FixtureRequest) -> Iterator[Doomed]:
    killed = "how" in request.fixturenames and request.getfixturevalue("how") == "killed"
    with (
        quick(far_kind, lost_after=NEVER if killed else LOST_AFTER) as device,
        Forked(lambda pipe: serve(far_kind, device.address, BIG, pipe)) as peer,
    ):
        address, remote = receive(peer.pipe)
        with device.connect(address) as channel:
            made = Doomed(far_kind, peer, device, channel, RemoteRegion.unpack(remote), device.allocate(8))
            yield made
            del made.region  # pytest keeps the fixture's value


def test_every_kind_of_wait_ends_and_names_the_peer(doomed: Doomed, how: str, in_thread: InThread) -> None:
    """With a channel, without one, and ``on_lost``: all at once, all asleep when it happens."""
    reasons: queue.Queue[str] = queue.Queue()
    doomed.channel.on_lost(reasons.put)
    told: list[str] = []

    def wait(channel: Channel | None) -> None:
        with pytest.raises(PeerLost) as caught:
            doomed.region.wait(0, 1, SECONDS, channel)
        told.append(str(caught.value))

    threads = [in_thread(lambda channel=channel: wait(channel)) for channel in (doomed.channel, None)]
    for thread in threads:
        assert thread.native_id
        until_asleep(os.getpid(), thread.native_id)
    doomed.end(how)
    for thread in threads:
        thread.join(SECONDS)
    told.append(reasons.get(timeout=SECONDS))
    assert len(told) == 3
    for text in told:
        assert text.startswith(f"{doomed.kind}: {doomed.name}"), text
        assert " is lost: it" in text
    assert doomed.channel.peer.startswith(doomed.name)
    with pytest.raises(PeerLost, match=doomed.name):
        doomed.channel.signal(doomed.remote.view(0, 8), 1)


def fill(channel: Channel, remote: RemoteRegion) -> None:
    """More operations than a channel takes: the last ones wait for room."""
    for _ in range(5000):
        channel.signal(remote.view(0, 8), 1)


@pytest.mark.parametrize("far_kind", ["tcp"])
def test_operations_on_their_way_end(doomed: Doomed, how: str, in_thread: InThread) -> None:
    """Completions that are waited for, awaited and called back, and a post that waits for room."""
    doomed.peer.stop()
    source = doomed.device.allocate(BIG, reserve=False)
    completions = [doomed.channel.write(source.view(), doomed.remote.view())]
    completions.append(doomed.channel.read(source.view(), doomed.remote.view()))
    called: queue.Queue[Completion] = queue.Queue()
    for completion in completions:
        completion.on_done(called.put)

    def post() -> None:
        with pytest.raises(PeerLost, match=doomed.name):
            fill(doomed.channel, doomed.remote)

    def wait_in_thread(completion: Completion) -> None:
        with pytest.raises(PeerLost, match=doomed.name):
            completion.wait(SECONDS)

    async def wait(completion: Completion) -> None:
        with pytest.raises(PeerLost, match=doomed.name):
            await completion

    def run_loop() -> None:
        async def main() -> None:
            await asyncio.gather(*(wait(completion) for completion in completions))

        asyncio.run(main())

    threads = [in_thread(post), in_thread(run_loop)]
    threads += [in_thread(lambda c=c: wait_in_thread(c)) for c in completions]
    if how == "killed":  # one that is stopped is given up whenever its time is over
        for thread in threads:
            assert thread.native_id
            until_asleep(os.getpid(), thread.native_id)
        doomed.peer.kill()
    for thread in threads:
        thread.join(SECONDS)
    for completion in completions:
        assert completion.done
        called.get(timeout=SECONDS)


def test_memory_is_settled_once_the_process_is_gone(doomed: Doomed) -> None:
    with pytest.raises(ArgumentError, match="not lost"):
        doomed.channel.settle()
    doomed.peer.stop()
    with pytest.raises(PeerLost):
        doomed.region.wait(0, 1, SECONDS, doomed.channel)
    if doomed.kind == "shm":
        with pytest.raises(WaitTimeout, match="may still write"):
            doomed.channel.settle(0.0)
        doomed.peer.kill()
    doomed.channel.settle(SECONDS)
    doomed.channel.close()


@pytest.mark.parametrize("far_kind", ["tcp"])
def test_to_settle_ends_what_the_peer_had_open(doomed: Doomed, in_thread: InThread) -> None:
    """What a stopped peer had sent over its own connection, or sends later, changes nothing any more."""

    def write_on(pipe: socket.socket) -> None:
        device = quick("tcp", lost_after=NEVER)
        channel = device.connect(doomed.device.address)
        send(pipe, device.address)
        word = RemoteRegion.unpack(receive(pipe)).view(0, 8)
        channel.signal(word, 1).wait(SECONDS)
        send(pipe, "told")
        receive(pipe)
        with pytest.raises(PeerLost):
            channel.signal(word, 2).wait(SECONDS)
        send(pipe, "refused")

    with Forked(write_on) as peer, doomed.device.connect(receive(peer.pipe)) as channel:
        send(peer.pipe, doomed.region.remote().pack())
        assert receive(peer.pipe) == "told"
        channel.liveness.lose("as if only this connection had broken")
        channel.settle()
        assert not doomed.channel.lost, "another peer's connection was cut"
        send(peer.pipe, "go on")
        assert receive(peer.pipe) == "refused"
        assert doomed.region.load(0) == 1


@pytest.mark.parametrize("far_kind", ["tcp"])
def test_memory_of_unfinished_operations_is_kept_then_freed(doomed: Doomed) -> None:
    def mapped() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum("memfd:tensorwire" in line and size(line) > BIG for line in lines)

    def size(line: str) -> int:
        start, end = line.split()[0].split("-")
        return int(end, 16) - int(start, 16)

    doomed.peer.stop()
    source = doomed.device.allocate(BIG, reserve=False)
    completions = [doomed.channel.write(source.view(), doomed.remote.view())]
    completions.append(doomed.channel.read(source.view(), doomed.remote.view()))
    source.close()
    del source, completions
    assert mapped() == 1, "memory was freed under an operation"
    with pytest.raises(PeerLost):
        doomed.region.wait(0, 1, SECONDS, doomed.channel)
    doomed.channel.close()
    assert mapped() == 0, "memory was not freed"


@pytest.mark.parametrize("far_kind", ["shm"])
def test_mapped_memory_of_a_dead_peer_stays_readable(doomed: Doomed) -> None:
    memory = doomed.channel.map(doomed.remote.view())
    assert memory is not None
    here = array(memory)
    here[:8] = 7
    doomed.peer.kill()
    doomed.channel.settle(SECONDS)
    assert np.all(here[:8] == 7)
    assert here[-1] == 0  # a page that nobody had touched


@pytest.mark.parametrize("dies", [True, False])
def test_a_word_without_a_ring_ends_its_wait(dies: bool, in_thread: InThread) -> None:
    """A peer may die between its store and its wake-up; no waiter stays behind in its futex."""

    def store(pipe: socket.socket) -> None:
        device = quick("shm", lost_after=NEVER)
        address, remote = receive(pipe)
        memory = device.connect(address).map(RemoteRegion.unpack(remote).view())
        words = np.frombuffer(memory, np.uint64)
        send(pipe, "mapped")
        receive(pipe)
        words[0] = 1  # a plain store, which rings no bell
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    with quick("shm", lost_after=NEVER) as device, device.allocate(8) as region, Forked(store) as peer:
        send(peer.pipe, (device.address, region.remote().pack()))
        assert receive(peer.pipe) == "mapped"
        thread = in_thread(lambda: region.wait(0, 1, SECONDS))
        assert thread.native_id
        until_asleep(os.getpid(), thread.native_id)
        send(peer.pipe, "store")
        thread.join(SECONDS)


def held() -> tuple[int, int, int, int]:
    """Threads, descriptors, mappings, and resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    counts = [len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("task", "fd")]
    return counts[0], counts[1], Path("/proc/self/maps").read_text().count("\n"), pages * 4096


@pytest.mark.slow
def test_nothing_is_left_of_a_hundred_dead_peers(far_kind: str) -> None:
    with quick(far_kind, lost_after=NEVER) as device, device.allocate(1 << 20) as region:

        def cycle() -> None:
            with Forked(lambda pipe: serve(far_kind, device.address, 1 << 20, pipe)) as peer:
                address, packed = receive(peer.pipe)
                with device.connect(address) as channel:
                    channel.write(region.view(), RemoteRegion.unpack(packed).view()).wait(SECONDS)
                    peer.kill()
                    with pytest.raises(PeerLost):
                        region.wait(0, 1, SECONDS, channel)
                    channel.settle(SECONDS)

        for i in range(110):
            if i == 10:
                before = held()
            cycle()
        threads = before[0]
        while len(list(Path("/proc/self/task").iterdir())) > threads:
            os.sched_yield()  # those that greeted the last peer are on their way out
        after = held()
    assert after[1] <= before[1], "descriptors grow"
    assert after[2] <= before[2] + 6, "mappings grow"
    assert after[3] <= before[3] + (8 << 20), "resident memory grows"
