"""An opened port: whose completions come to whom, who drains them, and what it holds."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.harness.cable import WORD, cable, until
from tests.harness.fake_nic import Fabric, FakeContext, FakeCQ, VerbsError

from tensorwire.device import VerbsDevice
from tensorwire.device.verbs import nic
from tensorwire.errors import PeerLost, VerbsUnavailable
from tensorwire.testing.patterns import SECONDS


def test_completions_come_to_the_channel_they_belong_to(fabric: Fabric) -> None:
    with cable(fabric) as c, contextlib.ExitStack() as stack:
        channels = [stack.enter_context(c.device.connect(c.other.address)) for _ in range(5)]
        with fabric.held():
            posted = [
                channel.write(c.source.view(64 * i, 64), c.remote.view(64 * i, 64), (c.remote.view(WORD, 8), i + 1))
                for i, channel in enumerate(channels)
            ]
            for at in (3, 0, 4, 1, 2):  # whichever the NIC finishes first
                pair = channels[at]._pair._qp  # type: ignore[attr-defined]
                assert not posted[at].done
                while pair.step():
                    pass
                posted[at].wait(SECONDS)
                assert (c.word, c.arrived(64 * at, 64)) == (at + 1, True)


def test_completion_queues_are_made_as_needed_and_reused(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nic, "_COMPLETIONS", 600)  # one channel's: 512 requests and 32 receives
    with cable(fabric) as c:
        queues = c.device._nic._completions
        assert len(queues) == 1
        channels = [c.device.connect(c.other.address) for _ in range(3)]
        assert len(queues) == 4
        for value, channel in enumerate(channels, 1):
            channel.signal(c.remote.view(WORD, 8), value).wait(SECONDS)
        for channel in channels:
            channel.close()
        for _ in range(3):
            with c.device.connect(c.other.address) as channel:
                channel.signal(c.remote.view(WORD, 8), 9).wait(SECONDS)
        assert len(queues) == 4
        assert c.device._nic._free.count(600) == 3


def test_several_threads_drain_and_each_finds_its_own(fabric: Fabric, in_thread: Callable[..., Any]) -> None:
    with cable(fabric) as c:
        start = threading.Barrier(4)

        def work(number: int) -> None:
            start.wait(SECONDS)
            for i in range(100):
                at = 64 * (8 * number + i % 8)
                c.write(at, 64).wait(SECONDS)
                assert c.arrived(at, 64)

        for thread in [in_thread(work, number) for number in range(4)]:
            thread.join(SECONDS)
        assert c.pair.sends_taken == 0


def test_receives_are_posted_again_when_nobody_waits(fabric: Fabric) -> None:
    """No thread of the target calls anything: the device's own attends to the completions."""
    with cable(fabric) as c:
        there = c.pair.peer
        assert there is not None
        for value in range(1, 101):
            c.channel.signal(c.remote.view(WORD, 8), value).wait(SECONDS)
        until(lambda: len(there.receives) == there.most_receives)


def test_a_nic_that_fails_loses_every_peer(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    with cable(fabric) as c:
        broken = c.device._nic._completions[0]
        real = FakeCQ.req_notify

        def req_notify(self: FakeCQ) -> None:
            if self is broken:
                raise VerbsError("ibv_req_notify_cq", errno.EIO)
            real(self)

        monkeypatch.setattr(FakeCQ, "req_notify", req_notify)
        with contextlib.suppress(PeerLost):  # the completion wakes the device's thread or this one: either finds out
            c.write(0, 64).wait(SECONDS)
        until(lambda: c.channel.liveness.lost)  # after the device itself, which `lost` counts, too
        with pytest.raises(PeerLost, match=r"fake0 failed: .*ibv_req_notify_cq"):
            c.write(0, 64)
        with pytest.raises(PeerLost, match="fake0 failed"):
            c.device.allocate(8)


def test_who_waits_for_a_nic_that_fails_loses_its_peer(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FakeCQ) -> None:
        raise VerbsError("ibv_req_notify_cq", errno.EIO)

    with cable(fabric) as c:
        monkeypatch.setattr(type(c.device._nic), "_drain_in_rounds", lambda self: None)  # leaves it to who waits
        monkeypatch.setattr(FakeCQ, "req_notify", refuse)
        c.write(0, 64).wait(SECONDS)  # its completion disarms the queue
        word = c.device.allocate(8)
        with pytest.raises(PeerLost, match=r"fake0 failed: .*ibv_req_notify_cq"):
            word.wait(0, at_least=1, timeout=SECONDS)


@pytest.mark.parametrize("step", ["create_comp_channel", "query_device", "alloc_pd", "create_cq"])
def test_a_nic_that_cannot_be_used(fabric: Fabric, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def refuse(*_: Any) -> None:
        raise VerbsError(step, errno.ENOMEM)

    monkeypatch.setattr(FakeContext, step, refuse)
    with pytest.raises(VerbsUnavailable, match=f"fake0 cannot be used: .*{step}"):
        VerbsDevice()


def test_close_gives_everything_back_and_is_idempotent(fabric: Fabric) -> None:
    with cable(fabric) as c:
        held = c.device._nic
        c.works()
        c.device.close()
        held.close()
        c.device.close()
        assert not held._thread.is_alive()
        assert held.drain() == held.drain(arm=True) == 0, "a closed NIC was asked for completions"
        assert fabric.opened == 1
    assert fabric.registered == {}
