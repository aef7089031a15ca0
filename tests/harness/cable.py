"""Two verbs devices of this process on the fake NIC, and a channel between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tensorwire.device import Channel, Region, RemoteRegion, VerbsDevice
from tensorwire.testing.patterns import SECONDS, array, pattern
from tests.harness.fake_nic import Fabric, FakeQP

WORD = 4096  # where the signal word lies in the target, behind the payload
NBYTES = WORD + 64


@dataclass
class Cable:
    """``target`` is memory of ``other``, the far device, and ``remote`` the capability for it; ``source`` is ours."""

    fabric: Fabric
    device: VerbsDevice
    other: VerbsDevice
    channel: Channel
    target: Region
    remote: RemoteRegion
    source: Region

    @property
    def pair(self) -> FakeQP:
        """The NIC's queue pair of the channel, at our end."""
        return queue_pair(self.channel)

    @property
    def opcodes(self) -> list[str]:
        """Of all that was executed on it."""
        return self.fabric.executed(self.pair)

    @property
    def word(self) -> int:
        """The signal word, in the target."""
        return self.target.load(WORD)

    def write(self, at: int, nbytes: int, signal: int | None = None, **options: Any) -> Any:
        """Posts a write of those bytes of the source to the same place in the target."""
        word = None if signal is None else (self.remote.view(WORD, 8), signal)
        return self.channel.write(self.source.view(at, nbytes), self.remote.view(at, nbytes), word, **options)

    def arrived(self, at: int, nbytes: int) -> bool:
        """Whether the target has these bytes of the source."""
        return bool((array(self.target)[at : at + nbytes] == array(self.source)[at : at + nbytes]).all())

    def works(self) -> None:
        """A write and a signal go through, and wake a waiter."""
        array(self.target)[:64] = 0
        value = self.word + 1
        self.write(0, 64, value).wait(SECONDS)
        self.target.wait(WORD, value, SECONDS)
        assert self.arrived(0, 64)


def queue_pair(channel: Any) -> FakeQP:
    """The NIC's queue pair of a channel, or of a lane."""
    pair: FakeQP = channel._pair._qp
    return pair


@contextlib.contextmanager
def cable(fabric: Fabric, **settings: Any) -> Iterator[Cable]:
    """Devices with these settings."""
    with VerbsDevice(**settings) as device, VerbsDevice(**settings) as other, device.connect(other.address) as channel:
        target, source = other.allocate(NBYTES), device.allocate(NBYTES)
        array(source)[:] = pattern(1, NBYTES)
        yield Cable(fabric, device, other, channel, target, target.remote(), source)


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does, and for nothing else."""
    import time

    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came"
