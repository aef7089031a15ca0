"""Signs of life: who is silent is lost; who beats slowly is not, and who was stopped takes nobody for lost."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import pytest
from tests.harness.forked import LOST_AFTER, NEVER, Forked, connect, quick, receive, send
from wire import DEVICES

from tensorwire._native import Liveness, Memory
from tensorwire.device import Device, Region, RemoteRegion
from tensorwire.errors import ArgumentError, PeerLost, WaitTimeout
from tensorwire.testing.patience import patient
from tensorwire.testing.patterns import SECONDS, until_asleep


def pass_time(region: Region, seconds: float) -> None:
    """Other threads get that long to do what they should not."""
    with pytest.raises(WaitTimeout):
        region.wait(0, 1, seconds)


def beats_slowly(kind: str, address: bytes, pipe: socket.socket, heartbeat: float) -> None:
    device = quick(kind, heartbeat=heartbeat, lost_after=NEVER)
    channel = device.connect(address)
    send(pipe, device.address)
    receive(pipe)
    send(pipe, channel.lost)


def test_a_peer_that_beats_slowly_is_not_lost(far_kind: str) -> None:
    """Its own interval counts, however short our patience: it does not beat while we look."""
    with (
        quick(far_kind, heartbeat=0.02, lost_after=0.1) as device,
        device.allocate(8) as region,
        Forked(lambda pipe: beats_slowly(far_kind, device.address, pipe, heartbeat=100.0)) as peer,
        device.connect(receive(peer.pipe)) as channel,
    ):
        pass_time(region, 0.75)  # a wait that names no channel: any loss would end it
        assert not channel.lost
        send(peer.pipe, "look")
        assert receive(peer.pipe) is False


def test_a_peer_that_beats_slowly_is_lost_when_it_is_stopped(far_kind: str) -> None:
    with (
        quick(far_kind, heartbeat=0.02, lost_after=0.1) as device,
        device.allocate(8) as region,
        Forked(lambda pipe: beats_slowly(far_kind, device.address, pipe, heartbeat=patient(0.3))) as peer,
        device.connect(receive(peer.pipe)) as channel,
    ):
        peer.stop()
        with pytest.raises(PeerLost, match="no sign of life"):
            region.wait(0, 1, SECONDS, channel)


def test_who_was_stopped_takes_nobody_for_lost(far_kind: str) -> None:
    """It counts its own ticks: on waking it reads what came meanwhile before it judges."""

    def stopped(pipe: socket.socket) -> None:
        device = quick(far_kind, heartbeat=0.05, lost_after=LOST_AFTER)
        address, remote = receive(pipe)
        channel = device.connect(address)
        region = device.allocate(8)
        send(pipe, (device.address, region.remote().pack()))
        receive(pipe)
        pass_time(region, 0.3)
        channel.signal(RemoteRegion.unpack(remote).view(), 1).wait(SECONDS)
        send(pipe, channel.lost)

    with (
        quick(far_kind, heartbeat=0.02, lost_after=NEVER) as device,
        device.allocate(8) as region,
        device.allocate(8) as idle,
        Forked(stopped) as peer,
    ):
        send(peer.pipe, (device.address, region.remote().pack()))
        address, remote = receive(peer.pipe)
        with device.connect(address) as channel:
            channel.signal(RemoteRegion.unpack(remote).view(), 0).wait(SECONDS)
            peer.stop()
            pass_time(idle, 1.5 * LOST_AFTER)
            peer.resume()
            send(peer.pipe, "look")
            assert receive(peer.pipe) is False
            region.wait(0, 1, SECONDS, channel)


def test_a_stopped_peer_learns_that_it_was_given_up(far_kind: str) -> None:
    """A loss is mutual: a peer that is resumed after it finds the connection ended, however patient it was."""

    def stopped(pipe: socket.socket) -> None:
        device = quick(far_kind, lost_after=NEVER)
        region = device.allocate(8)
        send(pipe, device.address)
        receive(pipe)
        try:
            region.wait(0, 1, SECONDS)
        except PeerLost as error:
            send(pipe, str(error))

    with (
        quick(far_kind) as device,
        device.allocate(8) as region,
        Forked(stopped) as peer,
        connect(device, receive(peer.pipe)) as channel,
    ):
        send(peer.pipe, "connected")
        peer.stop()
        for named in (channel, None):
            with pytest.raises(PeerLost, match="no sign of life"):
                region.wait(0, 1, SECONDS, named)
        peer.resume()
        assert "closed the connection" in receive(peer.pipe)


@pytest.mark.parametrize(
    ("heartbeat", "lost_after"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 1.9), (5000.0, 1e5), (float("nan"), 1.0), (1.0, 1e9)]
)
def test_settings_that_cannot_work_are_refused(far_kind: str, heartbeat: float, lost_after: float) -> None:
    with pytest.raises(ArgumentError, match="heartbeat"):
        quick(far_kind, heartbeat, lost_after)


def ends_at_once(device: Device, region: Region, name: str) -> None:
    with pytest.raises(PeerLost, match=name):
        region.wait(0, 1, SECONDS)


def test_ones_own_close_is_no_loss(kind: str) -> None:
    told: list[str] = []
    with DEVICES[kind]() as device, DEVICES[kind]() as other, device.allocate(8) as region:
        channel = device.connect(other.address)
        channel.on_lost(told.append)
        channel.close()
        channel.on_lost(told.append)
        pass_time(region, 0.01)
        assert channel.lost
        with pytest.raises(PeerLost, match="the channel was closed"):
            region.wait(0, 1, SECONDS, channel)
        last = device.connect(other.address)
        last.on_lost(told.append)
        device.close()
        assert last.lost
    for thread in threading.enumerate():
        if "on-lost" in thread.name or "callbacks" in thread.name:
            thread.join(SECONDS)
    assert told == []


def test_a_loss_ends_when_its_channel_is_closed(kind: str) -> None:
    """Waits that name no channel are ended by a peer that is lost, until this side has closed the channel to it."""
    with DEVICES[kind]() as device, device.allocate(8) as region:
        with DEVICES[kind]() as other:
            channel = device.connect(other.address)
        ends_at_once(device, region, "is lost")
        ends_at_once(device, region, "is lost")  # it is still so
        if kind != "shm":  # there the peer's process lives on: it is this one
            channel.settle(0.0)
        channel.close()
        channel.close()
        pass_time(region, 0.01)
        with DEVICES[kind]() as other, device.connect(other.address) as channel:
            pass_time(region, 0.01)
            region.store(0, 1)
            region.wait(0, 1, SECONDS)


def test_a_lost_peer_that_had_connected_is_forgotten_when_another_does(kind: str) -> None:
    with DEVICES[kind]() as device, device.allocate(16) as region:
        for value in (1, 2):
            with DEVICES[kind]() as other, other.connect(device.address) as channel:
                channel.signal(region.remote().view(0, 8), value).wait(SECONDS)
                region.wait(0, value, SECONDS)
                with pytest.raises(WaitTimeout):
                    region.wait(8, 1, 0.01)
            with pytest.raises(PeerLost, match="is lost"):
                region.wait(8, 1, SECONDS)


def test_a_loss_that_ends_at_once_still_ends_waits(in_thread: Callable[..., threading.Thread]) -> None:
    """The waiter looks only after the channel is closed already."""
    own = Liveness()
    child, memory = Liveness(own, "process 7"), Memory.allocate(8)
    memory.bind(own)
    outcomes: list[int] = []
    threads = [in_thread(lambda: outcomes.append(memory.wait(0, 1, SECONDS))) for _ in range(4)]
    for thread in threads:
        assert thread.native_id
        until_asleep(os.getpid(), thread.native_id)
    child.lose("gone")
    child.close("closed")
    for thread in threads:
        thread.join()
    assert outcomes == [2] * 4
    assert own.last_loss == "process 7 is lost: gone"
    assert (child.reason, child.closed, own.child_lost) == ("gone", False, False)
    assert memory.wait(0, 1, 0.0) == 1
