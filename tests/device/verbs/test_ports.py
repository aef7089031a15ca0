"""Which RDMA ports a machine has, which port and GID are taken, and why."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.harness.fakes import MAX_MESSAGE, MTU, ROCE, Sysfs
from tests.harness.fakes import sysfs as sysfs

from tensorwire.device.verbs.port_selection import PortChoice, select_port
from tensorwire.device.verbs.ports import Gid, PortAttributes, has_active_port, scan_ports
from tensorwire.errors import ArgumentError, VerbsUnavailable

INFINIBAND = {0: ("fe80::a:b", "IB/RoCE v1", "")}


def take(
    sysfs: Sysfs, port: str | None = None, index: int | None = None, near: str | None = None, **environment: str
) -> PortChoice:
    return select_port(scan_ports(sysfs.root, sysfs.ask), port, index, environment, near)


def taken(choice: PortChoice) -> tuple[str, int]:
    return choice.port.name, choice.gid.index


def test_what_a_port_says(sysfs: Sysfs) -> None:
    sysfs.port("mlx5_0")
    (port,) = scan_ports(sysfs.root, sysfs.ask)
    assert (port.name, port.state, port.link_layer, port.lid) == ("mlx5_0:1", "ACTIVE", "Ethernet", 0)
    assert (port.mtu, port.max_message, port.rate, port.trouble) == (MTU, MAX_MESSAGE, "100 Gb/sec (4X EDR)", "")
    mapped = bytes(10) + bytes([255, 255, 10, 0, 0, 1])
    assert port.gids[3] == Gid(3, mapped, "RoCE v2", "eth0")  # and the empty place behind it is none
    assert str(port.gid(3)) == "GID 3 (RoCE v2, 10.0.0.1, eth0)"
    assert len(port.gids) == len(ROCE)


def test_devices_are_in_the_order_of_their_numbers(sysfs: Sysfs) -> None:
    for name in ("mlx5_10", "mlx5_2", "bnxt_re0"):
        sysfs.port(name)
    assert [port.device for port in scan_ports(sysfs.root, sysfs.ask)] == ["bnxt_re0", "mlx5_2", "mlx5_10"]


@pytest.mark.parametrize(
    ("gids", "index", "why"),
    [
        (ROCE, 3, "with an IPv4 address"),
        ({**ROCE, 4: ("10.0.0.9", "RoCE v2", "eth0.7")}, 3, "with an IPv4 address"),
        ({0: ("fe80::1", "RoCE v2", "eth0"), 5: ("2001:db8::1", "RoCE v2", "eth0")}, 5, "with an IPv6 address"),
        ({0: ("fe80::1", "RoCE v2", "eth0"), 1: ("10.0.0.1", "IB/RoCE v1", "eth0")}, 0, "link-local"),
        ({0: ("fe80::1", "RoCE v2", "eth0"), 1: ("10.99.0.1", "RoCE v2", "eth0")}, 1, "with an IPv4 address"),  # rxe
    ],
)
def test_the_best_gid_of_roce(sysfs: Sysfs, gids: Mapping[int, tuple[str, str, str]], index: int, why: str) -> None:
    sysfs.port("mlx5_0", gids=gids)
    choice = take(sysfs)
    assert choice.gid.index == index
    assert choice.why.startswith("mlx5_0:1: the only usable port; GID ")
    assert why in choice.why


def test_infiniband_takes_its_first_gid(sysfs: Sysfs) -> None:
    sysfs.port("mlx5_0", gids={**INFINIBAND, 1: ("fe80::c:d", "IB/RoCE v1", "")}, layer="InfiniBand", lid=7)
    choice = take(sysfs)
    assert (taken(choice), choice.port.lid, choice.gid.kind) == (("mlx5_0:1", 0), 7, "InfiniBand")


def test_roce_1_is_taken_only_by_its_number(sysfs: Sysfs) -> None:
    sysfs.port("mlx5_0", gids={0: ROCE[0], 2: ROCE[2]})
    with pytest.raises(VerbsUnavailable, match=r"mlx5_0:1 has no routable GID.*ip addr add"):
        take(sysfs)
    choice = take(sysfs, index=2)
    assert (taken(choice), choice.gid.kind, choice.port.mtu) == (("mlx5_0:1", 2), "RoCE v1", MTU)


def test_only_what_is_up_and_can_do_it(sysfs: Sysfs) -> None:
    sysfs.port("irdma0", kind="4: RNIC")
    sysfs.port("mlx5_0", state="1: DOWN")
    sysfs.port("rdmap0", kind="7: unspecified")  # EFA
    assert not has_active_port(sysfs.root)
    with pytest.raises(VerbsUnavailable, match=r"irdma0 has no reliable.*RNIC.*mlx5_0:1 is DOWN; rdmap0 has no"):
        take(sysfs)
    sysfs.port("mlx5_0", 2)
    assert has_active_port(sysfs.root)
    assert taken(take(sysfs)) == ("mlx5_0:2", 3)


@pytest.mark.parametrize(("state", "advice"), [("2: INIT", "opensm"), ("1: DOWN", "ip link set")])
def test_no_active_port(sysfs: Sysfs, state: str, advice: str) -> None:
    sysfs.port("mlx5_0", state=state)
    with pytest.raises(VerbsUnavailable, match=f"no usable RDMA port: mlx5_0:1 is {state[3:]}.*{advice}"):
        take(sysfs)


def test_a_port_that_cannot_be_opened_says_why(sysfs: Sysfs) -> None:
    sysfs.port("mlx5_0")
    sysfs.port("mlx5_1")

    def only_one(device: str, number: int) -> PortAttributes:
        if device == "mlx5_0":
            raise VerbsUnavailable("no permission to use mlx5_0")
        return sysfs.ask(device, number)

    ports = scan_ports(sysfs.root, only_one)
    assert taken(select_port(ports, environment={})) == ("mlx5_1:1", 3)
    for asked in ({"port": "mlx5_0"}, {"port": "mlx5_0", "gid_index": 3}):
        with pytest.raises(VerbsUnavailable, match="no permission to use mlx5_0"):
            select_port(ports, environment={}, **asked)  # type: ignore[arg-type]


def test_what_was_asked_for(sysfs: Sysfs) -> None:
    for device, number in (("mlx5_0", 1), ("mlx5_1", 1), ("mlx5_1", 2)):
        sysfs.port(device, number)
    asked = {"TENSORWIRE_VERBS_PORT": "mlx5_1:2", "TENSORWIRE_VERBS_GID_INDEX": "1", "NCCL_IB_HCA": "mlx5_0"}
    choice = take(sysfs, NCCL_IB_GID_INDEX="0", **asked)
    assert taken(choice) == ("mlx5_1:2", 1)
    assert "asked for by TENSORWIRE_VERBS_PORT" in choice.why
    assert "asked for by TENSORWIRE_VERBS_GID_INDEX" in choice.why
    assert taken(take(sysfs, "mlx5_1", 2, **asked)) == ("mlx5_1:1", 2)  # arguments win


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"TENSORWIRE_VERBS_PORT": "mlx5_7"}, "TENSORWIRE_VERBS_PORT mlx5_7 is not here: there is mlx5_0:1$"),
        ({"TENSORWIRE_VERBS_PORT": "mlx5_0:2"}, "is not here"),
        ({"TENSORWIRE_VERBS_PORT": "mlx5_0:one"}, "such as mlx5_0 or mlx5_0:1"),
        ({"TENSORWIRE_VERBS_PORT": ":1"}, "such as mlx5_0 or mlx5_0:1"),
        ({"TENSORWIRE_VERBS_GID_INDEX": "9"}, "TENSORWIRE_VERBS_GID_INDEX 9 names no GID: mlx5_0:1 has GID 0 .*eth0"),
        ({"TENSORWIRE_VERBS_GID_INDEX": "-1"}, "number of a GID"),
    ],
)
def test_what_was_asked_for_and_is_not_there(sysfs: Sysfs, environment: dict[str, str], message: str) -> None:
    sysfs.port("mlx5_0")
    with pytest.raises(ArgumentError, match=message):
        take(sysfs, **environment)


@pytest.mark.parametrize(
    ("hint", "name"),
    [
        ("mlx5_1", "mlx5_1:1"),  # a prefix: mlx5_10, too
        ("=mlx5_10", "mlx5_10:1"),
        ("mlx5_1:2", "mlx5_1:2"),
        ("=mlx5_1:2,mlx5_10", "mlx5_1:2"),
        ("^mlx5_1", "mlx5_0:1"),
        ("^=mlx5_0,mlx5_1", "mlx5_10:1"),
        ("^mlx5_0, mlx5_1:1", "mlx5_1:2"),
        ("", "mlx5_0:1"),
    ],
)
def test_the_hint_of_nccl(sysfs: Sysfs, hint: str, name: str) -> None:
    for device, number in (("mlx5_0", 1), ("mlx5_1", 1), ("mlx5_1", 2), ("mlx5_10", 1)):
        sysfs.port(device, number)
    assert take(sysfs, NCCL_IB_HCA=hint).port.name == name


def test_a_hint_that_leads_nowhere_is_only_mentioned(sysfs: Sysfs) -> None:
    sysfs.port("mlx5_0")
    choice = take(sysfs, NCCL_IB_HCA="=mlx4_0", NCCL_IB_GID_INDEX="77")
    assert taken(choice) == ("mlx5_0:1", 3)
    assert "NCCL_IB_HCA==mlx4_0 leaves no usable port" in choice.why
    assert "NCCL_IB_GID_INDEX=77 is not a GID there" in choice.why
    assert taken(take(sysfs, NCCL_IB_GID_INDEX="1")) == ("mlx5_0:1", 1)
    assert "NCCL" not in take(sysfs, NCCL_IB_GID_INDEX="-1").why


def test_the_port_on_the_way_to_the_job(sysfs: Sysfs) -> None:
    sysfs.port("mlx5_0")
    sysfs.port("mlx5_1", gids={1: ("10.0.7.1", "RoCE v2", "eth1"), 2: ("10.0.8.1", "RoCE v2", "eth1.8")})
    choice = take(sysfs, near="10.0.8.1")
    assert taken(choice) == ("mlx5_1:1", 2)
    assert "the one at 10.0.8.1" in choice.why
    assert "the address that this process listens on" in choice.why
    for elsewhere in ("192.0.2.1", "127.0.0.1", "no address", None):
        assert taken(take(sysfs, near=elsewhere)) == ("mlx5_0:1", 3)
    assert taken(take(sysfs, "mlx5_0", near="10.0.8.1")) == ("mlx5_0:1", 3)


def test_infiniband_is_found_by_the_interface_on_it(sysfs: Sysfs) -> None:
    for device in ("mlx5_0", "mlx5_1"):
        sysfs.port(device, gids=INFINIBAND, layer="InfiniBand", lid=7)
    sysfs.net("mlx5_0", "ib0")
    sysfs.net("mlx5_1", "lo")  # an interface that every machine of the tests has
    choice = take(sysfs, near="127.0.0.1")
    assert (taken(choice), choice.gid.interface) == (("mlx5_1:1", 0), "lo")
    assert "the one at 127.0.0.1" in choice.why
