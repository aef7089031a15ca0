"""A callback that is asked for while its device closes comes all the same."""

from __future__ import annotations

import threading

from tensorwire.device import TcpDevice
from tensorwire.device.callbacks import Callbacks
from tensorwire.testing.patterns import SECONDS


def test_one_that_was_posted_too_late_is_run_by_its_poster() -> None:
    for started in (False, True):
        callbacks, called = Callbacks(), threading.Event()
        if started:
            callbacks.notices.post(callbacks.add(called.set))
            assert called.wait(SECONDS)
        callbacks.close()
        told: list[int] = []
        token = callbacks.add(lambda told=told: told.append(1))  # type: ignore[misc]
        callbacks.notices.post(token)
        callbacks.run_orphan(token)
        callbacks.run_orphan(token)
        assert told == [1]
        for thread in threading.enumerate():
            if thread.name == "tensorwire-callbacks":
                thread.join(SECONDS)


def test_asked_for_behind_the_close() -> None:
    """As by an await that found its completion open, and then was overtaken."""
    with TcpDevice() as device, TcpDevice() as target, device.connect(target.address) as channel:
        completion = channel.signal(target.allocate(8).remote().view(), 1)
        device.close()
        told: list[object] = []
        completion._call_when_done(told.append)
        assert told == [completion]
