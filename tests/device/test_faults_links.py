"""Two machines and a cable: network namespaces and a veth pair. A cut cable and a machine that vanishes."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from tests.harness.forked import Forked, quick, receive, send
from tests.harness.namespaces import cut_cable, ip, two_namespaces

from tensorwire.device import Channel, Completion, Region, RemoteRegion
from tensorwire.errors import PeerLost
from tensorwire.testing.patterns import SECONDS

ADDRESSES = ("10.213.9.1", "10.213.9.2")
BIG = 64 << 20  # more than the sockets on the way hold


@dataclass(frozen=True)
class Cable:
    """Two namespaces, joined."""

    names: tuple[str, str]

    def enter(self, side: int) -> None:
        """Puts this process, a forked child, into a namespace."""
        fd = os.open(f"/var/run/netns/{self.names[side]}", os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(fd, 0x40000000) == 0, os.strerror(ctypes.get_errno())
        os.close(fd)

    def vanish(self, side: int) -> None:
        """That machine answers nothing any more, and nothing it sends gets out."""
        ip("-n", self.names[side], "addr", "flush", "dev", "cable")


@pytest.fixture
def cable() -> Iterator[Cable]:
    with two_namespaces(ADDRESSES) as names:
        yield Cable(names)


def error_of(work: Callable[[], object]) -> str:
    """What it raised."""
    try:
        work()
    except PeerLost as error:
        return str(error)
    return "nothing"


def machine(cable: Cable, side: int, pipe: socket.socket) -> None:
    """A device on that side, a channel to the other one, waits on both; tells how they ended."""
    cable.enter(side)
    device = quick("tcp", interface=ADDRESSES[side])
    region = device.allocate(BIG, reserve=False)
    send(pipe, (device.address, region.remote().pack()))
    address, packed = receive(pipe)
    channel, remote = device.connect(address), RemoteRegion.unpack(packed)
    channel.signal(remote.view(0, 8), 1).wait(SECONDS)
    region.wait(0, 1, SECONDS)
    send(pipe, channel.peer)
    assert receive(pipe) == "cut"  # the cable is cut by now: what is written goes nowhere
    send(pipe, [error_of(work) for work in waits(channel, region, remote)])


def waits(channel: Channel, region: Region, remote: RemoteRegion) -> list[Callable[[], object]]:
    def write() -> Completion:
        return channel.write(region.view(), remote.view())

    return [
        lambda: write().wait(SECONDS),
        lambda: region.wait(0, 2, SECONDS, channel),
        lambda: region.wait(0, 2, SECONDS),
    ]


@pytest.mark.parametrize("how", ["cut", "vanished"])
def test_a_silent_link_is_a_loss(cable: Cable, how: str) -> None:
    """``cut``: both live on, and both are told. ``vanished``: half open; one was killed, and no word of it got out."""
    with Forked(lambda pipe: machine(cable, 0, pipe)) as here, Forked(lambda pipe: machine(cable, 1, pipe)) as there:
        cards = receive(here.pipe), receive(there.pipe)
        send(here.pipe, cards[1])
        send(there.pipe, cards[0])
        names = receive(here.pipe), receive(there.pipe)
        assert [name.split(":")[0] for name in names] == [ADDRESSES[1], ADDRESSES[0]]
        if how == "cut":
            cut_cable(cable.names)
        else:
            cable.vanish(1)
            there.kill()
        machines = [here, there] if how == "cut" else [here]
        for each in machines:
            send(each.pipe, "cut")
        for each, name in zip(machines, names, strict=False):
            reasons = receive(each.pipe)
            assert len(reasons) == 3
            for reason in reasons:
                assert f"{name.split(':')[0]}:" in reason, reason
                assert "is lost" in reason
