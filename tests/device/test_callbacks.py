"""Completions that call back, that are awaited, and that a fence waits for."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from typing import Any

import pytest
from conftest import FarPair, Pair
from device_peer import SECONDS, array, pattern

from tensorwire.device import Completion, TcpDevice
from tensorwire.errors import PeerLost, RemoteAccessError


class Told:
    """Collects what callbacks say."""

    def __init__(self) -> None:
        self.completions: list[Completion] = []
        self.threads: list[threading.Thread] = []
        self.event = threading.Event()

    def __call__(self, completion: Completion) -> None:
        self.completions.append(completion)
        self.threads.append(threading.current_thread())
        self.event.set()


def test_a_callback_runs_once_when_it_is_done(pair: Pair) -> None:
    remote, source = pair.target.allocate(1 << 20).remote(), pair.initiator.allocate(1 << 20)
    told = [Told() for _ in range(50)]
    completions = [pair.channel.write(source.view(), remote.view()) for _ in told]
    for completion, each in zip(completions, told, strict=True):
        completion.on_done(each)
    for completion, each in zip(completions, told, strict=True):
        assert each.event.wait(SECONDS)
        assert completion.done
    late = Told()
    completions[0].on_done(late)
    assert late.threads == [threading.current_thread()]
    pair.initiator.close()
    assert all(each.completions == [completion] for completion, each in zip(completions, told, strict=True))


def test_a_callback_hears_of_a_refusal(pair: Pair) -> None:
    remote, source = pair.target.allocate(8).remote("read"), pair.initiator.allocate(8)
    told = Told()
    pair.channel.write(source.view(), remote.view()).on_done(told)
    assert told.event.wait(SECONDS)
    with pytest.raises(RemoteAccessError):
        told.completions[0].wait(0.0)


def test_a_callback_hears_of_a_loss(far: FarPair) -> None:
    remote, source = far.peer.allocate(1 << 20), far.device.allocate(1 << 20)
    told = []
    if far.kind == "tcp":
        os.kill(far.peer.pid, signal.SIGSTOP)  # else all of it may be over
        for _ in range(64):
            told.append(Told())
            far.channel.write(source.view(), remote.view()).on_done(told[-1])
        assert not told[-1].event.is_set()
    lost = threading.Event()
    reasons: list[str] = []
    far.channel.on_lost(lambda why: (reasons.append(why), lost.set()))
    far.peer.kill()
    assert lost.wait(SECONDS)
    assert "lost" in reasons[0]
    for each in told:
        assert each.event.wait(SECONDS)
    if told:
        with pytest.raises(PeerLost):
            told[-1].completions[0].wait(0.0)


def test_a_callback_that_raises_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    with TcpDevice() as device, TcpDevice() as target, device.connect(target.address) as channel:
        remote, source = target.allocate(4 << 20).remote(), device.allocate(4 << 20)
        good = Told()

        def bad(completion: Completion) -> None:
            raise KeyError("mine")

        first, second = (channel.write(source.view(), remote.view()) for _ in range(2))
        first._call_when_done(bad)
        second._call_when_done(good)
        assert good.event.wait(SECONDS)
    assert [each.exc_type for each in failed] == [KeyError]


def test_many_are_awaited_at_once(pair: Pair) -> None:
    remote, source = pair.target.allocate(1 << 20).remote(), pair.initiator.allocate(1 << 20)

    async def all_of_them() -> None:
        threads = threading.active_count()
        writes = [pair.channel.write(source.view(0, 4096), remote.view(4096 * i, 4096)) for i in range(200)]

        async def one(completion: Completion) -> None:
            await completion

        await asyncio.gather(*map(one, writes))
        assert threading.active_count() <= threads + 1

    asyncio.run(all_of_them())


def test_a_fence_keeps_a_write_behind_a_read(pair: Pair) -> None:
    n = 4 << 20
    theirs = pair.target.allocate(n)
    array(theirs)[:] = pattern(0, n)
    remote, here, source = theirs.remote(), pair.initiator.allocate(n), pair.initiator.allocate(n)
    for i in range(1, 9):
        array(source)[:] = pattern(i, n)
        read = pair.channel.read(here.view(), remote.view())
        if i % 2:
            write = pair.channel.write(source.view(), remote.view(), fence=True)
        else:
            write = pair.channel.write(source.view(8, n - 8), remote.view(8, n - 8), (remote.view(0, 8), i), fence=True)
        read.wait(SECONDS)
        assert (array(here)[8:] == pattern(i - 1, n)[8:]).all()
        write.wait(SECONDS)


def test_a_fenced_signal_comes_after_an_atomic(pair: Pair) -> None:
    theirs = pair.target.allocate(16)
    remote = theirs.remote()
    for i in range(200):
        assert pair.channel.fetch_add(remote.view(8, 8), 1) == i
        pair.channel.signal(remote.view(0, 8), i + 1, fence=True).wait(SECONDS)
        assert theirs.load(8) == i + 1
