"""The pair every conformance test runs on, and the check that no test leaves anything behind."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from device_peer import DEVICES, Peer
from hypothesis import HealthCheck, settings

from tensorwire.device import Channel, Device

settings.register_profile(
    "device",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("device")


@pytest.fixture(scope="session", autouse=True)
def _quick_collections() -> None:
    """Collections look at what tests made, not at the test runner."""
    gc.collect()
    gc.freeze()


def _descriptors() -> dict[str, str]:
    found = {}
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            found[fd.name] = str(fd.readlink())
    return found


def _children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that ended just now; its children are another's by now
            found.update((task / "children").read_text().split())
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread, process, descriptor or name outlives the test."""
    before = _descriptors(), _children(), set(threading.enumerate())
    yield
    assert "/dev/shm" not in Path("/proc/self/maps").read_text(), "a mapping has a name"
    gc.collect()
    for thread in set(threading.enumerate()) - before[2]:
        assert thread.daemon, f"{thread} was left"
        thread.join(10.0)
        assert not thread.is_alive(), f"{thread} was left"
    gc.collect()
    left = {fd: what for fd, what in _descriptors().items() if before[0].get(fd) != what}
    assert not left, "descriptors were left"
    assert _children() <= before[1], "processes were left"


@dataclass(frozen=True)
class Pair:
    """Two devices of this process and a channel from one to the other."""

    kind: str
    initiator: Device
    target: Device
    channel: Channel


@pytest.fixture(params=list(DEVICES))
def kind(request: pytest.FixtureRequest) -> str:
    """The name of a device."""
    name: str = request.param
    return name


@pytest.fixture(params=["shm", "tcp"])
def far_kind(request: pytest.FixtureRequest) -> str:
    """The name of a device that reaches other processes."""
    name: str = request.param
    return name


@pytest.fixture
def pair(kind: str) -> Iterator[Pair]:
    """Both ends in this process."""
    with DEVICES[kind]() as initiator, DEVICES[kind]() as target, initiator.connect(target.address) as channel:
        yield Pair(kind, initiator, target, channel)


@dataclass(frozen=True)
class FarPair:
    """A device of this process, another process with one, and a channel to it."""

    kind: str
    device: Device
    peer: Peer
    channel: Channel


@pytest.fixture
def far(far_kind: str) -> Iterator[FarPair]:
    """The target in another process."""
    with DEVICES[far_kind]() as device, Peer(far_kind) as peer, device.connect(peer.address) as channel:
        yield FarPair(far_kind, device, peer, channel)


@pytest.fixture
def in_thread() -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    """Runs something in a thread; what it raises fails the test."""
    threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def begin(work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return threads[-1]

    yield begin
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    for error in errors:
        raise error
