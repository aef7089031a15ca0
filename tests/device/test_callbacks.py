"""Callbacks of the tcp device, whose operations are over later than their calls."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from tensorwire.device import Completion, TcpDevice
from tensorwire.testing.patterns import SECONDS


def test_a_callback_that_raises_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    with TcpDevice() as device, TcpDevice() as target, device.connect(target.address) as channel:
        remote, source = target.allocate(4 << 20).remote(), device.allocate(4 << 20)
        told, good = [], threading.Event()

        def bad(completion: Completion) -> None:
            raise KeyError("mine")

        first, second = (channel.write(source.view(), remote.view()) for _ in range(2))
        first._call_when_done(bad)
        second._call_when_done(lambda completion: (told.append(completion), good.set()))
        assert good.wait(SECONDS)
    assert told == [second]
    assert [each.exc_type for each in failed] == [KeyError]
