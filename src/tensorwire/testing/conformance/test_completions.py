"""Completions: waited for, awaited, called back; once, and with the error of the operation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tensorwire.device import Completion
from tensorwire.errors import PeerLost, RemoteAccessError
from tensorwire.testing.fixtures import FarPair, Pair, need_an_active_peer
from tensorwire.testing.patterns import SECONDS, array, filled, noise, until_done

NBYTES = 8192


def test_awaited_completions(pair: Pair) -> None:
    region, source = pair.target.allocate(1 << 20), pair.initiator.allocate(1 << 20)
    array(source)[:] = noise(1 << 20)

    async def main() -> None:
        await asyncio.gather(*(one(i) for i in range(8)))

    async def one(i: int) -> None:
        at = i << 17
        await pair.channel.write(source.view(at, 1 << 17), region.remote().view(at, 1 << 17))
        await pair.channel.signal(region.remote().view(at, 8), i)

    asyncio.run(main())
    want = array(source).copy()
    want.reshape(8, -1)[:, :8] = np.arange(8, dtype=np.uint64)[:, None].view(np.uint8).reshape(8, 8)
    assert np.array_equal(array(region), want)


def test_an_await_raises_what_a_wait_raises(pair: Pair) -> None:
    region = filled(pair.target, NBYTES)

    async def main() -> None:
        await pair.channel.signal(replace(region.remote(), key=1).view(0, 8), 1)

    with pytest.raises(RemoteAccessError):
        asyncio.run(main())


def test_an_await_does_not_block_the_loop(far: FarPair) -> None:
    need_an_active_peer(far)
    remote, source = far.peer.allocate(32 << 20), far.device.allocate(32 << 20)
    far.peer.stop()

    async def both() -> list[str]:
        order = []

        async def transfer() -> None:
            await far.channel.write(source.view(), remote.view())
            order.append("written")

        async def resume() -> None:
            order.append("resumed")
            far.peer.resume()

        await asyncio.gather(transfer(), resume())
        return order

    assert asyncio.run(both()) == ["resumed", "written"]


def test_a_cancelled_await_leaves_the_transfer_alone(far: FarPair) -> None:
    need_an_active_peer(far)
    remote, source = far.peer.allocate(NBYTES), far.device.allocate(NBYTES)
    array(source)[:] = 8
    far.peer.stop()
    completion = far.channel.write(source.view(), remote.view())

    async def give_up() -> None:
        waiting = asyncio.ensure_future(until_done(completion))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        far.peer.resume()
        await completion

    asyncio.run(give_up())
    assert far.peer.call("content", remote.key, 0, NBYTES) == bytes([8]) * NBYTES


def test_many_are_awaited_at_once(pair: Pair) -> None:
    remote, source = pair.target.allocate(1 << 20).remote(), pair.initiator.allocate(1 << 20)

    async def all_of_them() -> None:
        threads = threading.active_count()
        writes = [pair.channel.write(source.view(0, 4096), remote.view(4096 * i, 4096)) for i in range(200)]
        await asyncio.gather(*map(until_done, writes))
        assert threading.active_count() <= threads + 8  # not one for each

    asyncio.run(all_of_them())


class Calls:
    """What was called back, and in which thread."""

    def __init__(self) -> None:
        self.completions: list[Completion] = []
        self.threads: set[int] = set()
        self._changed = threading.Condition()

    def __call__(self, completion: Completion) -> None:
        with self._changed:
            self.completions.append(completion)
            self.threads.add(threading.get_ident())
            self._changed.notify_all()

    def until(self, count: int) -> None:
        """Returns when there were so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.completions) >= count, SECONDS)


def test_a_callback_comes_once_for_each(pair: Pair) -> None:
    region, source = pair.target.allocate(1 << 20), pair.initiator.allocate(1 << 20)
    calls = Calls()
    posted = [pair.channel.write(source.view(), region.remote().view()) for _ in range(50)]
    for completion in posted:
        completion.on_done(calls)
    calls.until(50)
    assert all(completion.done for completion in posted)
    assert sorted(map(id, calls.completions)) == sorted(map(id, posted))


def test_what_is_done_is_called_back_at_once(pair: Pair) -> None:
    region = pair.target.allocate(8)
    completion = pair.channel.signal(region.remote().view(), 1)
    completion.wait(SECONDS)
    calls = Calls()
    for _ in range(2):
        completion.on_done(calls)
    assert calls.completions == [completion, completion]
    assert calls.threads == {threading.get_ident()}


def test_a_callback_of_what_was_refused_finds_its_error(pair: Pair) -> None:
    region, calls = filled(pair.target, NBYTES), Calls()
    completion = pair.channel.signal(replace(region.remote(), key=1).view(0, 8), 1)
    completion.on_done(calls)
    calls.until(1)
    assert calls.completions == [completion]
    with pytest.raises(RemoteAccessError):
        completion.wait(0.0)


def test_callbacks_come_when_the_peer_dies(far: FarPair) -> None:
    need_an_active_peer(far)
    remote, source, calls = far.peer.allocate(32 << 20), far.device.allocate(32 << 20), Calls()
    far.channel.signal(remote.view(0, 8), 0).wait(SECONDS)
    far.peer.stop()
    posted = [far.channel.write(source.view(), remote.view()) for _ in range(3)]
    for completion in posted:
        completion.on_done(calls)
    assert not calls.completions
    far.peer.kill()
    calls.until(3)
    for completion in posted:
        with pytest.raises(PeerLost):
            completion.wait(0.0)


def test_callbacks_come_when_the_channel_is_closed(far: FarPair) -> None:
    remote, source, calls = far.peer.allocate(8 << 20), far.device.allocate(8 << 20), Calls()
    posted = [far.channel.write(source.view(), remote.view()) for _ in range(5)]
    for completion in posted:
        completion.on_done(calls)
    far.channel.close()
    calls.until(5)
    assert sorted(map(id, calls.completions)) == sorted(map(id, posted))


def test_a_callback_may_post(pair: Pair) -> None:
    """A chain of transfers without a thread of its own."""
    region, source = pair.target.allocate(8), pair.initiator.allocate(8)
    remote, calls, ended = region.remote(), Calls(), threading.Event()

    def post(i: int) -> Callable[[Completion], None]:
        def call(completion: Completion) -> None:
            calls(completion)
            if i == 10:
                ended.set()
            else:
                pair.channel.write(source.view(), remote.view(), (remote.view(), i)).on_done(post(i + 1))

        return call

    pair.channel.signal(remote.view(), 0).on_done(post(1))
    assert ended.wait(SECONDS)
    assert region.load(0) == 9
