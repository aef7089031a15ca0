"""A peer that dies, or forks, is noticed, and takes nobody with it."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import threading

import pytest

from tensorwire.errors import PeerLost
from tensorwire.testing.fixtures import FarPair, InThread
from tensorwire.testing.patterns import GONE, SECONDS, array, every_use, until_asleep
from tensorwire.testing.peer import Peer
from tensorwire.testing.spec import DeviceSpec


def killed_when_asleep(peer: Peer, in_thread: InThread) -> None:
    """Kills the peer once this process's main thread sleeps."""

    def kill() -> None:
        until_asleep(os.getpid())
        peer.kill()

    in_thread(kill)


def test_death_wakes_a_wait_on_a_region(far: FarPair) -> None:
    region = far.device.allocate(8)
    far.peer.start("die_when_asleep", os.getpid())
    with pytest.raises(PeerLost):
        region.wait(0, 1, SECONDS, far.channel)
    far.peer.kill()


def test_death_wakes_a_wait_that_names_no_channel(far_spec: DeviceSpec) -> None:
    with far_spec.make() as device, Peer(far_spec) as peer:
        region = device.allocate(8)
        peer.call("connect", device.address)  # the only connection is the peer's own
        peer.call("send_signal", region.remote(), 0, 1)
        region.wait(0, 1, SECONDS)
        peer.start("die_when_asleep", os.getpid())
        with pytest.raises(PeerLost):
            region.wait(0, 2, SECONDS)
        region.wait(0, 1, SECONDS)  # what had arrived stays
        peer.kill()


def test_death_wakes_a_wait_on_a_completion(far: FarPair, in_thread: InThread) -> None:
    remote, source = far.peer.allocate(64 << 20), far.device.allocate(64 << 20)
    far.channel.signal(remote.view(0, 8), 0).wait(SECONDS)  # mapped, where it can be
    far.peer.stop()
    completions = [far.channel.write(source.view(), remote.view()) for _ in range(2)]
    completions.append(far.channel.read(source.view(), remote.view()))
    one_sided = far.device.capabilities.one_sided  # then it was over before, whatever the peer does
    if one_sided:
        completions[-1].wait(SECONDS)
    in_thread(far.peer.kill) if one_sided else killed_when_asleep(far.peer, in_thread)
    for completion in completions:
        with contextlib.nullcontext() if one_sided else pytest.raises(PeerLost):
            completion.wait(SECONDS)
        assert completion.done
    until_lost(far)
    array(source)[:] = 1  # the memory is this process's alone again
    for use in every_use(far.channel, source, remote, 0):
        with pytest.raises(PeerLost):
            use()


def until_lost(far: FarPair) -> str:
    reasons: queue.Queue[str] = queue.Queue()
    far.channel.on_lost(reasons.put)
    return reasons.get(timeout=SECONDS)


def test_on_lost_is_called_once_with_a_reason(far: FarPair) -> None:
    reasons: queue.Queue[str] = queue.Queue()
    far.channel.on_lost(reasons.put)
    assert not far.channel.lost
    far.peer.kill()
    assert "lost" in reasons.get(timeout=SECONDS)
    assert far.channel.lost
    assert "lost" in until_lost(far)  # at once, when it already is
    far.channel.close()
    far.device.close()
    for thread in threading.enumerate():
        if thread.name == "tensorwire-on-lost":
            thread.join(SECONDS)
    assert reasons.empty()


def test_other_channels_outlive_a_death(far: FarPair) -> None:
    with Peer(far.spec) as other, far.device.connect(other.address) as channel:
        remote = other.allocate(8)
        far.peer.kill()
        until_lost(far)
        channel.signal(remote.view(), 7).wait(SECONDS)
        assert other.call("content", remote.key, 0, 8) == b"\x07" + bytes(7)
        with pytest.raises(GONE):
            far.device.connect(far.peer.address, timeout=SECONDS)


def test_a_forked_child_does_not_hide_a_death(far: FarPair) -> None:
    device, peer, channel = far.device, far.peer, far.channel
    peer.call("connect", device.address)
    region = device.allocate(8)
    pidfd = os.pidfd_open(peer.call("fork_idler"))
    try:
        peer.start("die_when_asleep", os.getpid())
        with pytest.raises(PeerLost):
            region.wait(0, 1, SECONDS, channel)
        assert not select.select([pidfd], [], [], 0)[0], "the child had ended too early to show anything"
        peer.kill()
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], SECONDS)[0]
        os.close(pidfd)


def test_a_forked_child_can_use_nothing_and_disturbs_nobody(spec: DeviceSpec) -> None:
    with Peer(spec) as peer:
        remote = peer.allocate(64)
        peer.call("connect", peer.address)
        peer.call("send_signal", remote, 0, 1)
        answers = peer.call("fork_and_use", remote)
        assert answers.pop("a device of its own") == "worked"
        assert set(answers) >= {"write", "read", "signal", "wait", "allocate", "connect"}
        for name, error in answers.items():
            assert error.startswith("PeerLost: "), (name, error)
            assert "forked child" in error
        peer.call("send_signal", remote, 0, 2)
        assert peer.call("wait", remote.key, 2, SECONDS) == "reached"
        assert peer.call("content", remote.key, 0, 8) == b"\x02" + bytes(7)
