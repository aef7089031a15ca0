"""Which device reaches a peer: shm where its memory really can be mapped, tcp else, and the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest

from tensorwire.control.reach import Card, Whereabouts, connect, expected, whereabouts, why_not_shm
from tensorwire.device import Device, ShmDevice, TcpDevice
from tensorwire.errors import ArgumentError, PeerLost

HERE = whereabouts()
OTHERS = {
    "different machines": msgspec.structs.replace(HERE, boot="another"),
    "different network namespaces": msgspec.structs.replace(HERE, network="net:[1]"),
    "different users": msgspec.structs.replace(HERE, user=HERE.user + 1),
}


@pytest.fixture
def devices() -> Iterator[dict[str, Device]]:
    """A process's devices."""
    with ShmDevice() as shm, TcpDevice() as tcp:
        yield {"shm": shm, "tcp": tcp}


@pytest.fixture
def card() -> Iterator[Card]:
    """Another one's card; its devices are in this process, which makes no difference to them."""
    with ShmDevice() as shm, TcpDevice() as tcp:
        yield Card(HERE, shm.address, shm.allocate(8).remote("read").pack(), tcp.address)


def test_memory_that_can_be_mapped_is(devices: dict[str, Device], card: Card) -> None:
    channel, route = connect(devices, HERE, card)
    assert (channel.device.name, route.device) == ("shm", "shm")
    assert "mapped" in route.why
    assert expected(HERE, card.where).device == "shm"


@pytest.mark.parametrize("why", OTHERS)
def test_elsewhere_is_reached_by_tcp(devices: dict[str, Device], card: Card, why: str) -> None:
    there = msgspec.structs.replace(card, where=OTHERS[why])
    channel, route = connect(devices, HERE, there)
    assert (channel.device.name, route.device) == ("tcp", "tcp")
    assert why in route.why
    assert expected(HERE, there.where).device == "tcp"  # what the doctor says is what happens
    assert why in expected(HERE, there.where).why
    with pytest.raises(PeerLost, match=why):
        connect({"shm": devices["shm"]}, HERE, there)


def test_what_cannot_be_mapped_after_all_is_reached_by_tcp(devices: dict[str, Device], card: Card) -> None:
    assert card.shm is not None
    assert card.probe is not None
    lies = {
        "cannot reach that device": msgspec.structs.replace(card, shm=bytes(16) + card.shm[16:]),
        "no open region has that key": msgspec.structs.replace(card, probe=card.probe[:8] + bytes(8) + card.probe[16:]),
    }
    for why, lie in lies.items():
        channel, route = connect(devices, HERE, lie)
        assert channel.device.name == "tcp"
        assert why in route.why
    shm = devices["shm"]
    assert isinstance(shm, ShmDevice)
    assert not shm._channels, "a channel that was not used is open"


def test_one_device_is_what_both_were_told(devices: dict[str, Device], card: Card) -> None:
    told = msgspec.structs.replace(card, shm=None, probe=None)
    _, route = connect({"tcp": devices["tcp"]}, HERE, told)
    assert route.device == "tcp"
    assert "told to use" in route.why
    with pytest.raises(PeerLost, match="no device in common"):
        connect({"shm": devices["shm"]}, HERE, told)


def test_users_are_numbers_of_one_namespace() -> None:
    one = Whereabouts("b", "n", 0, "user:[1]")
    assert why_not_shm(one, Whereabouts("b", "n", 1000, "user:[2]")) is None  # trying it will show


def test_processes_that_are_not_there() -> None:
    assert whereabouts(os.getpid()) == HERE
    with pytest.raises(ArgumentError, match="no process 99999999"):
        whereabouts(99999999)
