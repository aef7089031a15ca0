"""Which device reaches a peer: shm where its memory can be mapped, verbs where a write arrived, tcp else; and why."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator

import msgspec
import pytest

from tensorwire.control.locality import Locality, locality, why_not_shm
from tensorwire.control.reach import NAMED, Card, Endpoint, connect, endpoint, expected
from tensorwire.device import Device, LoopbackDevice, Region, ShmDevice, TcpDevice
from tensorwire.errors import ArgumentError, PeerLost, WaitTimeout
from tensorwire.testing import FaultyDevice

HERE = locality()
OTHERS = {
    "different machines": msgspec.structs.replace(HERE, boot="another"),
    "different network namespaces": msgspec.structs.replace(HERE, network="net:[1]"),
    "different users": msgspec.structs.replace(HERE, user=HERE.user + 1),
}


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Devices and their regions know each other: their descriptors would end in the middle of another test."""
    yield
    gc.collect()


@pytest.fixture
def devices() -> Iterator[dict[str, Device]]:
    """A process's devices."""
    with ShmDevice() as shm, TcpDevice() as tcp:
        yield {"shm": shm, "tcp": tcp}


@pytest.fixture
def card() -> Iterator[Card]:
    """Another one's card; its devices are in this process, which makes no difference to them."""
    with ShmDevice() as shm, TcpDevice() as tcp:
        yield Card(HERE, {"shm": endpoint(shm), "tcp": endpoint(tcp)})


def replaced(card: Card, name: str, there: Endpoint | None) -> Card:
    """The card with another entry for a device, or with none."""
    others = {other: each for other, each in card.devices.items() if other != name}
    return msgspec.structs.replace(card, devices=others if there is None else {**others, name: there})


def test_memory_that_can_be_mapped_is(devices: dict[str, Device], card: Card) -> None:
    channel, route = connect(devices, HERE, card)
    assert (channel.device.name, route.device) == ("shm", "shm")
    assert "mapped" in route.why
    assert expected(HERE, card.where).device == "shm"


@pytest.mark.parametrize("why", OTHERS)
def test_other_machines_are_reached_by_tcp(devices: dict[str, Device], card: Card, why: str) -> None:
    there = msgspec.structs.replace(card, where=OTHERS[why])
    channel, route = connect(devices, HERE, there)
    assert (channel.device.name, route.device) == ("tcp", "tcp")
    assert why in route.why
    foreseen = expected(HERE, there.where, {"verbs": "no active RDMA port"})
    assert foreseen.device == "tcp"  # what the doctor says is what happens
    assert why in foreseen.why
    with pytest.raises(PeerLost, match=why):
        connect({"shm": devices["shm"]}, HERE, there)


def test_what_cannot_be_mapped_after_all_is_reached_by_tcp(devices: dict[str, Device], card: Card) -> None:
    address, probe = card.devices["shm"].address, card.devices["shm"].probe
    lies = {
        "cannot reach that device": replaced(card, "shm", Endpoint(bytes(16) + address[16:], probe)),
        "no open region has that key": replaced(card, "shm", Endpoint(address, probe[:16] + bytes(8) + probe[24:])),
    }
    for why, lie in lies.items():
        channel, route = connect(devices, HERE, lie)
        assert channel.device.name == "tcp"
        assert why in route.why
    shm = devices["shm"]
    assert isinstance(shm, ShmDevice)
    assert not shm._channels, "a channel that was not used is open"


def test_a_named_device_is_used_by_both(devices: dict[str, Device], card: Card) -> None:
    told = replaced(card, "shm", None)
    _, route = connect({"tcp": devices["tcp"]}, HERE, told)
    assert route.device == "tcp"
    assert "told to use" in route.why
    with pytest.raises(PeerLost, match="no device in common: shm here, tcp there"):
        connect({"shm": devices["shm"]}, HERE, told)


# ---- verbs: here a stand-in, which connects and writes as any device does


@pytest.fixture
def rdma() -> Iterator[Device]:
    """Our end of what stands for verbs."""
    with LoopbackDevice() as device:
        yield device


@pytest.fixture
def word() -> Iterator[Region]:
    """The probe of the other side, which has its address, too."""
    with LoopbackDevice() as device:
        region = device.allocate(8)
        memoryview(region)[:] = b"\xff" * 8
        yield region


def far(card: Card, word: Region, why: str = "different machines", *, address: bytes = b"", probe: bytes = b"") -> Card:
    """The card of a process elsewhere that has verbs."""
    there = Endpoint(address or word.device.address, probe or word.remote("write").pack())
    return msgspec.structs.replace(replaced(card, "verbs", there), where=OTHERS[why])


@pytest.mark.parametrize("why", ["different machines", "different network namespaces"])
def test_over_a_network_verbs_is_taken_once_a_write_arrived(
    devices: dict[str, Device], rdma: Device, card: Card, word: Region, why: str
) -> None:
    found: list[str] = []
    there = far(card, word, why)
    channel, route = connect({**devices, "verbs": rdma}, HERE, there, agree=lambda _, own: found.append(own) or own)
    assert (channel.device, route.device, found) == (rdma, "verbs", [""])
    assert why in route.why
    assert "a first write arrived" in route.why
    assert bytes(memoryview(word)) == bytes(8), "nothing was written"
    assert expected(HERE, there.where).device == "verbs"


def test_on_one_machine_verbs_is_never_taken(
    devices: dict[str, Device], rdma: Device, card: Card, word: Region
) -> None:
    for why, device in (("different users", "tcp"), (None, "shm")):
        there = msgspec.structs.replace(far(card, word), where=OTHERS[why] if why else HERE)
        _, route = connect({**devices, "verbs": rdma}, HERE, there, agree=lambda *_: pytest.fail("nothing to agree on"))
        assert route.device == device
        assert "verbs" not in route.why
        assert expected(HERE, there.where).device == device


def test_without_verbs_at_one_end_it_is_tcp(devices: dict[str, Device], rdma: Device, card: Card, word: Region) -> None:
    _, route = connect(devices, HERE, far(card, word), absent={"verbs": "memlock is too small"})
    assert str(route) == "tcp: not shm: the processes run on different machines; not verbs: memlock is too small"
    there = msgspec.structs.replace(replaced(far(card, word), "verbs", None), absent={"verbs": "no active RDMA port"})
    _, route = connect({**devices, "verbs": rdma}, HERE, there)
    assert str(route).endswith("; not verbs: no active RDMA port (at the other end)")


def test_verbs_that_does_not_work_is_not_taken(
    devices: dict[str, Device], rdma: Device, card: Card, word: Region
) -> None:
    there, other_key = far(card, word), LoopbackDevice().allocate(8).remote().pack()
    tries = {
        "no open device": (FaultyDevice(rdma), far(card, word, address=bytes(16))),
        "no open region has that key": (FaultyDevice(rdma), far(card, word, probe=other_key)),
        "injected": (FaultyDevice(rdma, refuse_memory_at=1), there),
        "within 2 s": (FaultyDevice(rdma, fail_every=1, error=lambda: WaitTimeout("within 2 s")), there),
    }
    for why, (device, card_there) in tries.items():
        channel, route = connect({**devices, "verbs": device}, HERE, card_there)
        assert (channel.device.name, route.device) == ("tcp", "tcp")
        assert re.search(f"not verbs: .*{why}", route.why)
        assert not device._channels, "a channel that was not used is open"


def test_both_sides_take_the_same(devices: dict[str, Device], rdma: Device, card: Card, word: Region) -> None:
    channel, route = connect({**devices, "verbs": rdma}, HERE, far(card, word), agree=lambda *_: "it does not get back")
    assert channel.device.name == "tcp"
    assert "not verbs: it does not get back" in route.why
    with pytest.raises(PeerLost, match=r"the other side reached us, and we cannot reach it .*no open device"):
        connect({**devices, "verbs": rdma}, HERE, far(card, word, address=bytes(16)), agree=lambda *_: "")


def test_verbs_alone_is_used_on_one_machine_too(rdma: Device, card: Card, word: Region) -> None:
    there = Card(HERE, {"verbs": far(card, word).devices["verbs"]})
    channel, route = connect({"verbs": rdma}, HERE, there)
    assert (channel.device, route.device, route.why) == (rdma, "verbs", NAMED)


def test_users_are_numbers_of_one_namespace() -> None:
    one = Locality("b", "n", 0, "user:[1]")
    assert why_not_shm(one, Locality("b", "n", 1000, "user:[2]")) is None  # trying it will show


def test_processes_that_are_not_there() -> None:
    assert locality(os.getpid()) == HERE
    with pytest.raises(ArgumentError, match="no process 99999999"):
        locality(99999999)
