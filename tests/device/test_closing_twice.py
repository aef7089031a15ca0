"""Two threads close one thing at once: either comes back only when it is over, and whoever waits is told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from tensorwire._native import DeathNotifier, Engine, Heartbeat, Liveness, Monitor, Notices, Watcher
from tensorwire.device import LoopbackDevice, Region, ShmDevice, TcpDevice
from tensorwire.device.callbacks import Callbacks
from tensorwire.device.shm import ShmChannel
from tensorwire.testing import FaultyDevice
from tensorwire.testing.fixtures import InThread
from tensorwire.testing.patterns import SECONDS

OTHERS = 300_000  # who are told first: their notices take longer than all the rest of a close
NEVER = 2**60  # the number of an operation that nobody posts


def test_a_call_whose_token_comes_after_the_close_runs(in_thread: InThread) -> None:
    """That of an operation is posted by whoever ends its connection, perhaps another thread."""
    callbacks, called = Callbacks(), threading.Event()
    token = callbacks.add(called.set)
    closing = [in_thread(callbacks.close) for _ in range(2)]
    while not callbacks._closed:
        threading.Event().wait(0.001)
    callbacks.notices.post(token)
    for thread in closing:
        thread.join(SECONDS)
        assert called.is_set()


def test_two_who_close_a_tcp_device_lose_no_notice(in_thread: InThread) -> None:
    """The notice of an awaited write, which nobody answers, is the last of very many that the first closer posts."""
    with TcpDevice() as target:
        device = TcpDevice()
        channel = device.connect(target.address)
        others, told = Notices(), threading.Event()
        for number in range(OTHERS):
            channel._connection.notify(NEVER, others, number)  # type: ignore[attr-defined]
        token = device.callbacks.add(told.set)
        channel._connection.notify(NEVER, device.callbacks.notices, token)  # type: ignore[attr-defined]
        for thread in [in_thread(device.close) for _ in range(2)]:
            thread.join(SECONDS)
            assert told.is_set()  # by the time that either close() is over


def twice(in_thread: InThread, close: Callable[[], object], is_over: Callable[[], bool]) -> list[bool]:
    """Whether it was over when each of two calls came back."""
    both, over = threading.Barrier(2), list[bool]()

    def run() -> None:
        both.wait(SECONDS)
        close()
        over.append(is_over())

    for thread in [in_thread(run) for _ in range(2)]:
        thread.join(SECONDS)
    return over


def test_either_of_two_who_close_comes_back_when_it_is_over(in_thread: InThread) -> None:
    for _ in range(20):
        ours, theirs = socket.socketpair()
        with ours, theirs, ShmDevice() as target:
            notifier, monitor, engine = DeathNotifier(1.0, 10.0), Monitor(), Engine(Liveness(), 1.0, 10.0)
            beats = Heartbeat(ours.fileno(), b"beat", 3600.0)
            watcher = Watcher(target.allocate(8))
            channel = target.connect(target.address)
            assert isinstance(channel, ShmChannel)
            assert twice(in_thread, notifier.close, lambda n=notifier: n.fd < 0) == [True, True]  # type: ignore[misc]
            assert twice(in_thread, channel.close, lambda c=channel: c._sock.fileno() < 0) == [True, True]  # type: ignore[misc]
            for each in (monitor, engine, beats, watcher):
                assert twice(in_thread, each.close, lambda: True) == [True, True]


def test_no_key_is_left_when_either_of_two_who_close_a_region_comes_back(in_thread: InThread) -> None:
    class Slow(LoopbackDevice):
        first, go = threading.Event(), threading.Event()

        def _withdraw(self, region: Region) -> None:
            if not self.first.is_set():
                self.first.set()
                assert self.go.wait(SECONDS)
            super()._withdraw(region)

    with Slow() as device, device.allocate(8) as region:
        region.remote()
        slow = in_thread(region.close)
        assert device.first.wait(SECONDS)
        region.close()
        assert not device._exposed
        device.go.set()
        slow.join(SECONDS)


def test_a_faulty_device_waits_for_what_another_thread_closes(in_thread: InThread) -> None:
    """Its callbacks end only when the operations that it holds back have been handed on."""
    with LoopbackDevice() as target:
        for _ in range(20):
            device = FaultyDevice(LoopbackDevice(), delay=0.001)
            channel = device.connect(target.address)
            remote, source = target.allocate(8).remote(), device.allocate(8)
            posted = [channel.write(source.view(), remote.view()) for _ in range(20)]
            assert twice(in_thread, device.close, lambda p=posted: all(each.done for each in p)) == [True, True]  # type: ignore[misc]
