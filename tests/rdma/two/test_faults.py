"""A device of this guest, a device of the second, and what goes wrong between them."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tensorwire.device import Channel, Region, RemoteRegion, VerbsDevice
from tensorwire.errors import PeerLost, RemoteAccessError
from tensorwire.testing.patterns import array
from tests.rdma.devices import own
from tests.rdma.two.conftest import Far

SECONDS = 60.0  # only a guard
SIZE = 1 << 16


@pytest.fixture
def device() -> Iterator[VerbsDevice]:
    """This guest's."""
    with own() as made:
        yield made


@pytest.fixture
def channel(far: Far, device: VerbsDevice) -> Iterator[Channel]:
    """To a process in the second guest, by which ``far.call("call_peer", ...)`` is answered."""
    address = far.call("start_peer", "tests.rdma.devices:own")
    with device.connect(address) as made:
        yield made
    far.call("close_peer")


def test_a_wrong_key_is_refused_and_the_channel_lives_on(far: Far, device: VerbsDevice, channel: Channel) -> None:
    source = device.allocate(SIZE)
    array(source)[:] = 7
    remote = far.call("call_peer", "allocate", SIZE, "write", True)
    for wrong in (dataclasses.replace(remote, key=remote.key ^ 0x5A), dataclasses.replace(remote, length=1 << 30)):
        start = time.monotonic()
        with pytest.raises(RemoteAccessError):
            channel.write(source.view(), wrong.view(wrong.length - SIZE, SIZE)).wait(SECONDS)
        print(f"\na wrong key or range: refused after {time.monotonic() - start:.3f} s")
        channel.write(source.view(0, 16), remote.view(0, 16)).wait(SECONDS)
    assert far.call("call_peer", "content", remote.key, 0, SIZE) == b"\7" * 16 + bytes(SIZE - 16)


def test_a_killed_peer_is_lost(far: Far, device: VerbsDevice, channel: Channel) -> None:
    mine = device.allocate(64)
    remote = far.call("call_peer", "allocate", SIZE, "write", True)
    far.call("kill_peer")
    start = time.monotonic()
    with pytest.raises(PeerLost):
        mine.wait(0, 1, SECONDS, channel)
    print(f"\nkill -9: PeerLost {time.monotonic() - start:.2f} s later")
    with pytest.raises(PeerLost):
        channel.write(mine.view(), remote.view(0, 64)).wait(SECONDS)


CUTS = {
    "link down here": (["ip", "link", "set", "eth0", "down"], ["ip", "link", "set", "eth0", "up"]),
    "nothing gets through": (
        ["tc", "qdisc", "add", "dev", "eth0", "root", "netem", "loss", "100%"],
        ["tc", "qdisc", "delete", "dev", "eth0", "root"],
    ),
}


@pytest.fixture(params=list(CUTS))
def cut(request: pytest.FixtureRequest) -> Iterator[Callable[[], object]]:
    """Cuts the cable; it is whole again afterwards."""
    now, later = CUTS[request.param]
    yield functools.partial(subprocess.run, now, check=True)
    subprocess.run(later, check=True)


WAYS: dict[str, Callable[[Channel, Region, RemoteRegion], None]] = {
    "writing": lambda channel, mine, remote: channel.write(mine.view(), remote.view(0, 64)).wait(SECONDS),
    "waiting for a signal": lambda channel, mine, _: mine.wait(0, 1, SECONDS, channel),
}


@pytest.mark.parametrize("doing", list(WAYS))
def test_a_peer_behind_a_cut_cable_is_lost(
    far: Far, device: VerbsDevice, channel: Channel, cut: Callable[[], object], doing: str
) -> None:
    mine = device.allocate(64)
    remote = far.call("call_peer", "allocate", SIZE, "write", True)
    channel.write(mine.view(), remote.view(0, 64)).wait(SECONDS)
    cut()
    start = time.monotonic()
    with pytest.raises(PeerLost):
        WAYS[doing](channel, mine, remote)
    print(f"\n{doing}: PeerLost {time.monotonic() - start:.2f} s later")
