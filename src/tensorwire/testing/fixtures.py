"""The pair on which every test of a device runs, and the check that no test leaves anything behind.

A test module or ``conftest.py`` imports the fixtures that it needs; ``spec`` names their devices.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tensorwire.device import Channel, Device
from tensorwire.testing.forkserver import forkserver
from tensorwire.testing.patterns import SECONDS
from tensorwire.testing.peer import Peer
from tensorwire.testing.spec import DeviceSpec

InThread = Callable[..., threading.Thread]  # what to run, and its arguments

# The same examples every time, however slow the machine is today.
SEEDED = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    """Peers are forked from one process, that is there before the first test looks around."""
    forkserver()
    gc.collect()
    gc.freeze()  # collections look at what tests made, not at the test runner
    yield
    gc.unfreeze()
    forkserver().close()
    forkserver.cache_clear()


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


def _named() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "/dev/shm" in line}  # libraries of earlier tests may have semaphores there


def _let_go_of_failures() -> None:
    """A failed test is reported as such, and not for what its frames, which pytest keeps, hold."""
    error: BaseException | None = getattr(sys, "last_value", None)
    while error is not None:
        for frame, _line in traceback.walk_tb(error.__traceback__):
            with contextlib.suppress(RuntimeError):  # pytest's own, which still run
                frame.clear()
                _ = frame.f_locals  # the copy of its variables that pytest looked at, which thereby becomes empty, too
        error = error.__cause__ or error.__context__


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread, process, descriptor or name outlives the test."""
    before = _descriptors(), _children(), set(threading.enumerate()), _named()
    yield
    _let_go_of_failures()
    assert _named() <= before[3], "a mapping has a name"
    gc.collect()
    for thread in set(threading.enumerate()) - before[2]:
        assert thread.daemon, f"{thread} was left"
        thread.join(SECONDS)
        assert not thread.is_alive(), f"{thread} was left"
    gc.collect()
    left = {fd: what for fd, what in _descriptors().items() if before[0].get(fd) != what}
    assert not left, "descriptors were left"
    assert _children() <= before[1], "processes were left"


@dataclass(frozen=True)
class Pair:
    """Two devices of this process and a channel from one to the other."""

    spec: DeviceSpec
    initiator: Device
    target: Device
    channel: Channel


@pytest.fixture
def pair(spec: DeviceSpec) -> Iterator[Pair]:
    """Both ends in this process."""
    with spec.make() as initiator, spec.make() as target, initiator.connect(target.address) as channel:
        yield Pair(spec, initiator, target, channel)


@pytest.fixture
def far_spec(spec: DeviceSpec) -> DeviceSpec:
    """A device that reaches other processes; the test is skipped for one that does not."""
    with spec.make() as device:
        if not device.capabilities.other_processes:
            pytest.skip(f"{spec.text} does not reach other processes")
    return spec


@dataclass(frozen=True)
class FarPair:
    """A device of this process, another process with one, and a channel to it."""

    spec: DeviceSpec
    device: Device
    peer: Peer
    channel: Channel


@pytest.fixture
def far(far_spec: DeviceSpec) -> Iterator[FarPair]:
    """The target in another process."""
    with far_spec.make() as device, Peer(far_spec) as peer, device.connect(peer.address) as channel:
        yield FarPair(far_spec, device, peer, channel)


def need_an_active_peer(far: FarPair) -> None:
    """The test is skipped where a stopped peer holds up no write."""
    if far.device.capabilities.one_sided:
        pytest.skip("its writes are over whatever the peer does")


@pytest.fixture
def in_thread() -> Iterator[InThread]:
    """Runs something in a thread; what it raises fails the test."""
    threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def begin(work: Callable[..., object], *arguments: Any) -> threading.Thread:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                errors.append(error)

        threads.append(threading.Thread(target=run, daemon=True))  # a failed test is not to keep the run from ending
        threads[-1].start()
        return threads[-1]

    yield begin
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    for error in errors:
        raise error
