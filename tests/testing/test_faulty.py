"""Each fault happens when it was asked for, and nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator

import pytest

from tensorwire.device import Completion, Device, LoopbackDevice, ShmDevice, TcpDevice
from tensorwire.errors import ArgumentError, OutOfMemory, PeerLost, RemoteAccessError, WaitTimeout
from tensorwire.testing import FaultyChannel, FaultyDevice
from tensorwire.testing.fixtures import InThread
from tensorwire.testing.patterns import SECONDS, until_asleep

KINDS = [LoopbackDevice, ShmDevice, TcpDevice]
HELD = 3600.0  # longer than any test: what is held back stays there


@pytest.fixture(params=KINDS, ids=[kind.name for kind in KINDS])
def devices(request: pytest.FixtureRequest) -> Iterator[tuple[Device, Device]]:
    """One to wrap, and its peer."""
    with request.param() as device, request.param() as peer:
        yield device, peer


Devices = tuple[Device, Device]


def test_the_peer_is_lost_after_so_many_operations(devices: Devices) -> None:
    device, peer = devices
    with FaultyDevice(device, lose_after=3) as faulty, faulty.connect(peer.address) as channel:
        region, source, back = peer.allocate(64), faulty.allocate(8), faulty.allocate(8)
        source.store(0, 7)
        word = region.remote().view(0, 8)
        lost: queue.Queue[str] = queue.Queue()
        channel.on_lost(lost.put)
        done = [channel.signal(word, 1), channel.read(back.view(), word), channel.write(source.view(), word)]
        for completion in done:
            completion.wait(SECONDS)
        assert "injected after 3 operations" in lost.get(timeout=SECONDS)
        assert channel.lost
        for use in (lambda: channel.signal(word, 2), lambda: channel.fetch_add(word, 1)):
            with pytest.raises(PeerLost, match="injected"):
                use()
        with pytest.raises(PeerLost, match="injected"):
            source.wait(0, 99, SECONDS, channel)
        assert region.load(0) == 7
        with faulty.connect(peer.address) as another:  # a peer that came back
            another.signal(word, 5).wait(SECONDS)
        assert region.load(0) == 5


@pytest.mark.parametrize("delay", [0.0, HELD])
def test_the_peer_is_lost_by_call(devices: Devices, in_thread: InThread, delay: float) -> None:
    device, peer = devices
    with FaultyDevice(device, delay=delay) as faulty, faulty.connect(peer.address) as channel:
        word, mine = peer.allocate(8).remote().view(), faulty.allocate(8)
        held = channel.signal(word, 1) if delay else None

        def wait() -> None:
            with pytest.raises(PeerLost, match="a cable"):
                mine.wait(0, 1, SECONDS, channel)

        thread = in_thread(wait)
        assert thread.native_id
        until_asleep(threading.main_thread().native_id or 0, thread.native_id)
        faulty.lose_peers("a cable was cut")
        thread.join()
        with pytest.raises(PeerLost, match="a cable"):
            channel.signal(word, 1)
        if held is not None:
            channel.close()  # what is held back is not waited for
            with pytest.raises(PeerLost):
                held.wait(SECONDS)
            assert held.done


def test_every_third_operation_fails_and_changes_nothing(devices: Devices) -> None:
    device, peer = devices

    class Odd(Exception):
        pass

    for error, expected in ((None, RemoteAccessError), (Odd, Odd)):
        faults = {"fail_every": 3} if error is None else {"fail_every": 3, "error": error}
        faulty = FaultyDevice(device, **faults)  # type: ignore[arg-type]
        with faulty.connect(peer.address) as channel:
            region = peer.allocate(80)
            posted = [channel.signal(region.remote().view(8 * i, 8), 1) for i in range(8)]
            for i, completion in enumerate(posted):
                if i % 3 == 2:
                    with pytest.raises(expected):
                        completion.wait(SECONDS)
                else:
                    completion.wait(SECONDS)
            with pytest.raises(expected):
                channel.fetch_add(region.remote().view(72, 8), 1)
            assert [region.load(8 * i) for i in range(10)] == [1, 1, 0, 1, 1, 0, 1, 1, 0, 0]


def test_memory_is_refused_once(devices: Devices) -> None:
    with FaultyDevice(devices[0], refuse_memory_at=3) as faulty:
        faulty.allocate(8)
        faulty.register(bytearray(8))
        with pytest.raises(OutOfMemory, match="injected"):
            faulty.register(bytearray(8))
        assert faulty.allocate(8).nbytes == 8


def test_what_is_held_back_has_not_happened(devices: Devices) -> None:
    device, peer = devices
    with FaultyDevice(device, delay=HELD) as faulty, faulty.connect(peer.address) as channel:
        region = peer.allocate(8)
        completion = channel.signal(region.remote().view(), 1)
        with pytest.raises(WaitTimeout, match="do not reuse"):
            completion.wait(0.01)
        with pytest.raises(WaitTimeout):
            channel.fetch_add(region.remote().view(), 1, timeout=0.01)
        assert not completion.done
        assert region.load(0) == 0


def test_a_full_channel_makes_its_user_wait(in_thread: InThread) -> None:
    with LoopbackDevice() as peer, FaultyDevice(LoopbackDevice(), delay=HELD) as faulty:
        channel, word = faulty.connect(peer.address), peer.allocate(8).remote().view()
        posted: list[Completion] = []

        def post() -> None:
            with contextlib.suppress(PeerLost):
                while True:
                    posted.append(channel.signal(word, 1))

        thread = in_thread(post)
        assert thread.native_id
        while len(posted) < 1024:
            thread.join(0.001)
        until_asleep(threading.main_thread().native_id or 0, thread.native_id)
        assert len(posted) == 1024
        channel.close()
        thread.join()
        for completion in posted:
            with pytest.raises(PeerLost):
                completion.wait(SECONDS)


def test_nothing_is_held_back_once_the_channel_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that hands on is gone by then, even if the device has not heard yet that the channel is."""
    with ShmDevice() as device, FaultyDevice(device, delay=1e-6) as faulty, device.allocate(8) as region:
        channel = faulty.connect(device.address)
        word = region.remote().view()
        channel.signal(word, 1).wait(SECONDS)
        with monkeypatch.context() as until_later:
            until_later.setattr(channel._inner, "close", lambda: None)
            channel.close()
            with pytest.raises(PeerLost):
                channel.signal(word, 2)
        channel.close()
        assert region.load(0) == 1


def test_delays_keep_the_order_and_calls_come_back_first(devices: Devices) -> None:
    device, peer = devices
    with FaultyDevice(device, delay=0.002, seed=7) as faulty, faulty.connect(peer.address) as channel:
        region = peer.allocate(8)
        order: queue.Queue[int] = queue.Queue()
        posted = [channel.signal(region.remote().view(), i) for i in range(50)]
        assert not posted[-1].done
        for i, completion in enumerate(posted):
            completion.on_done(lambda _, i=i: order.put(i))  # type: ignore[misc]
        posted[-1].wait(SECONDS)
        assert all(completion.done for completion in posted)
        assert region.load(0) == 49
        called = [order.get(timeout=SECONDS) for _ in posted]
        assert sorted(called) == list(range(50))

        async def two() -> None:
            await asyncio.gather(*(one(i) for i in (60, 61)))

        async def one(i: int) -> None:
            await channel.signal(region.remote().view(), i)

        asyncio.run(two())
        assert region.load(0) == 61


def test_a_seed_decides_the_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    def delays(seed: int) -> list[float]:
        seen: list[float] = []
        with LoopbackDevice() as peer, FaultyDevice(LoopbackDevice(), delay=1e-4, seed=seed) as faulty:
            for channel in (faulty.connect(peer.address), faulty.connect(peer.address)):
                wait = channel._closed.wait
                channel._closed.wait = lambda seconds, wait=wait: (seen.append(seconds), wait(seconds))[1]  # type: ignore
                for i in range(10):
                    channel.signal(peer.allocate(8).remote().view(), i).wait(SECONDS)
        return seen

    first = delays(1)
    assert first == delays(1)
    assert first != delays(2)
    assert len(set(first)) == 20
    assert all(0 <= seconds <= 1e-4 for seconds in first)


@pytest.mark.parametrize(
    "faults", [{"delay": -1}, {"lose_after": 0}, {"fail_every": 0}, {"fail_every": -1}, {"refuse_memory_at": 0}]
)
def test_nonsense_is_refused(faults: dict[str, int]) -> None:
    with LoopbackDevice() as device, pytest.raises(ArgumentError):
        FaultyDevice(device, **faults)  # type: ignore[arg-type]


def test_the_rest_is_the_devices_own(devices: Devices) -> None:
    device, peer = devices
    with FaultyDevice(device) as faulty:
        assert (faulty.name, faulty.address, faulty.capabilities) == (device.name, device.address, device.capabilities)
        with faulty.connect(peer.address) as channel, peer.connect(faulty.address) as back:
            assert isinstance(channel, FaultyChannel)
            region, mine = peer.allocate(8), faulty.allocate(8)
            assert (channel.map(region.remote().view()) is not None) == device.capabilities.maps
            back.signal(mine.remote().view(), 4).wait(SECONDS)
            mine.wait(0, 4, SECONDS, channel)
            faulty.abort("the job ended")
            with pytest.raises(PeerLost, match="the job ended"):
                channel.signal(region.remote().view(), 1)
