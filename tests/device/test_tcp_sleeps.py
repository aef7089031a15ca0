"""How often waiters of a tcp device sleep, and how often its own thread is woken, is counted."""

from __future__ import annotations

import pytest

from tensorwire.device import RemoteRegion, TcpDevice
from tensorwire.errors import WaitTimeout


def test_a_wait_for_what_does_not_come_sleeps() -> None:
    with TcpDevice() as device:
        before = device._engine.sleeps
        with pytest.raises(WaitTimeout):
            device.allocate(64).wait(0, 1, 0.05)
        assert device._engine.sleeps > before


def test_a_write_wakes_the_thread_of_a_target_that_does_not_wait() -> None:
    with TcpDevice() as source, TcpDevice() as target:
        region = target.allocate(64)
        channel = source.connect(target.address)
        there = RemoteRegion.unpack(region.remote().pack())
        before = target._engine.wake_ups
        channel.write(source.allocate(8).view(), there.view(0, 8), (there.view(8, 8), 1)).wait()
        assert target._engine.wake_ups > before
        assert region.load(8) == 1
