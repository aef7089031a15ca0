"""Members that have verbs (a stand-in for it): who opens it, and that both ends of a pair take the same device."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import pytest

from tensorwire.control import Member, member, reach
from tensorwire.device import LoopbackDevice, registry
from tensorwire.device.verbs import VerbsDevice
from tensorwire.errors import OutOfMemory, PeerLost, VerbsUnavailable
from tests.control.conftest import SECRET, Jobs
from tests.harness.sandbox import every

Join = Callable[..., Member]


class StandIn(LoopbackDevice):
    """In place of the verbs device. ``trouble`` is raised when it is made; ``refuses`` to connect."""

    trouble: Exception | None = None
    made = 0
    refuses = False

    name = "verbs"
    capabilities = VerbsDevice.capabilities

    def __init__(self) -> None:
        if self.trouble:
            raise self.trouble
        super().__init__()
        StandIn.made += 1

    def connect(self, address: bytes, timeout: float = 30.0) -> object:  # type: ignore[override]
        if self.refuses:
            raise PeerLost("verbs: the queue pair did not connect")
        return super().connect(address, timeout)


def break_verbs(one: Member) -> None:
    """It connects to nobody any more."""
    device = one.devices["verbs"]
    assert isinstance(device, StandIn)
    device.refuses = True


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Joins a job from a machine of its own that has an active RDMA port."""
    monkeypatch.setitem(registry.BUILT_IN, "verbs", StandIn)
    monkeypatch.setattr(reach, "has_active_port", lambda: True)
    for name, value in (("trouble", None), ("made", 0)):
        monkeypatch.setattr(StandIn, name, value)
    with contextlib.closing(Jobs()) as jobs, contextlib.ExitStack() as stack:
        coordinator = jobs.coordinator(workers=3)

        def made(index: int, device: str = "auto", interface: str = "0.0.0.0") -> Member:
            where = msgspec.structs.replace(locality(), boot=f"machine {index}")
            monkeypatch.setattr(member, "locality", lambda: where)
            joined = Member(coordinator.address, SECRET, "worker", index, device=device, interface=interface)
            stack.callback(joined.close)
            return joined

        locality = member.locality
        yield made
    gc.collect()  # the probes' memory


def test_both_ends_take_verbs(join: Join) -> None:
    one, other = join(0), join(1)
    channels = every([partial(one.channel, "worker 1"), partial(other.channel, "worker 0")])
    assert [c.device for c in channels] == [one.devices["verbs"], other.devices["verbs"]]
    assert [m.routes[name].device for m, name in ((one, "worker 1"), (other, "worker 0"))] == ["verbs", "verbs"]


def test_whoever_tries_first_decides_for_both(join: Join) -> None:
    one, other = join(0), join(1)
    break_verbs(one)
    assert one.channel("worker 1").device is one.devices["tcp"]
    assert other.channel("worker 0").device is other.devices["tcp"]  # though it reached the other side
    for route in (one.routes["worker 1"], other.routes["worker 0"]):
        assert "not verbs: the queue pair did not connect" in route.why


def test_a_way_in_one_direction_is_an_error(join: Join) -> None:
    one, other = join(0), join(1)
    break_verbs(other)
    assert one.channel("worker 1").device is one.devices["verbs"]
    with pytest.raises(PeerLost, match=r"no device reaches worker 0: verbs: the other side reached us.*--device tcp"):
        other.channel("worker 0")


@pytest.mark.parametrize("error", [VerbsUnavailable("no permission"), OutOfMemory("memlock is too small")])
def test_auto_goes_on_without_verbs(join: Join, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(StandIn, "trouble", error)
    one, other = join(0), join(1)
    assert one.card("worker 1").devices.keys() == {"shm", "tcp"}
    assert one.channel("worker 1").device is one.devices["tcp"]
    assert f"not verbs: {error}" in one.routes["worker 1"].why
    assert other.channel("worker 0").device.name == "tcp"
    with pytest.raises(type(error), match=str(error)):
        join(2, "verbs")


def test_nothing_is_opened_without_an_active_port(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "has_active_port", lambda: False)
    one, _ = join(0), join(1)
    assert (StandIn.made, "verbs" in one.devices) == (0, False)
    assert one.channel("worker 1").device.name == "tcp"
    assert "not verbs: no active RDMA port" in one.routes["worker 1"].why


@pytest.mark.parametrize("interface", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_nothing_is_opened_where_nobody_could_come(join: Join, interface: str) -> None:
    assert set(join(0, interface=interface).devices) == {"shm", "tcp"}
    assert StandIn.made == 0
    assert "verbs" in join(1, "verbs", interface).devices  # but by name it is


def test_verbs_by_name_is_all_there_is(join: Join) -> None:
    one, _ = join(0, "verbs"), join(1, "verbs")
    assert set(one.devices) == {"verbs"}
    assert (
        str(one.channel("worker 1") and one.routes["worker 1"]) == "verbs: the device that both sides were told to use"
    )


def test_the_real_device_takes_what_members_give_it() -> None:
    with pytest.raises(VerbsUnavailable):  # no port here; any other error is a wrong argument
        VerbsDevice.for_job(interface="127.0.0.1", heartbeat=1.0, lost_after=10.0)
