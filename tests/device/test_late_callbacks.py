"""A callback that is asked for when its device has closed comes all the same."""

from __future__ import annotations

import queue

from tensorwire.device import TcpDevice
from tensorwire.device.callbacks import Callbacks
from tensorwire.testing.patterns import SECONDS


def test_one_that_comes_behind_the_close_is_run_once() -> None:
    for started in (False, True):
        callbacks = Callbacks()
        told: queue.Queue[int] = queue.Queue()
        if started:
            callbacks.notices.post(callbacks.add(lambda told=told: told.put(0)))  # type: ignore[misc]
            assert told.get(timeout=SECONDS) == 0
        callbacks.close()
        for number in (1, 2):
            token = callbacks.add(lambda told=told, number=number: told.put(number))  # type: ignore[misc]
            callbacks.notices.post(token)
            callbacks.notices.post(token)
            assert told.get(timeout=SECONDS) == number
        callbacks.close()
        assert told.empty()


def test_asked_for_behind_the_close() -> None:
    """As by an await that found its completion open, and then was overtaken."""
    with TcpDevice() as device, TcpDevice() as target, device.connect(target.address) as channel:
        completion = channel.signal(target.allocate(8).remote().view(), 1)
        device.close()
        told: queue.Queue[object] = queue.Queue()
        completion._call_when_done(told.put)
        assert told.get(timeout=SECONDS) is completion
