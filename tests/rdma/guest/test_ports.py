"""Ports, GIDs and what is wrong with them, as a real kernel and libibverbs show them; and what the doctor says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorwire.control import Coordinator, Member
from tensorwire.device import VerbsDevice
from tensorwire.device.verbs.library import open_device
from tensorwire.device.verbs.port_selection import select_port
from tensorwire.device.verbs.ports import Port, scan_ports
from tensorwire.doctor.devices import devices
from tensorwire.doctor.rdma import verbs
from tensorwire.errors import VerbsUnavailable
from tests.rdma.wire import ADDRESSES, MTU

NODES = Path("/dev/infiniband")


def found(name: str) -> Port:
    return next(port for port in scan_ports() if port.device == name)


def test_what_is_here() -> None:
    ports = scan_ports()
    assert [port.name for port in ports] == ["rxa:1", "rxb:1"]
    for port, address in zip(ports, ADDRESSES, strict=True):
        assert (port.state, port.trouble, port.mtu) == ("ACTIVE", "", 4096)
        assert port.mtu < MTU
        assert port.max_message == 8 << 20
        assert address in [str(gid.address) for gid in port.gids if gid.kind == "RoCE v2"]


@pytest.mark.parametrize(("at", "name"), list(zip(ADDRESSES, ("rxa", "rxb"), strict=True)))
def test_the_port_at_an_address_is_taken(at: str, name: str) -> None:
    choice = select_port(scan_ports(), environment={}, near=at)
    assert (choice.port.device, str(choice.gid.address)) == (name, at)
    with VerbsDevice(interface=at) as device:
        assert device._nic.port.device == name


def test_nodes_that_are_not_there() -> None:
    NODES.rename("/dev/elsewhere")
    try:
        with pytest.raises(VerbsUnavailable, match=r"rxa: /dev/infiniband/uverbs\d is missing: in a container"):
            open_device("rxa")
        with pytest.raises(VerbsUnavailable, match=r"no usable RDMA port: .*--device /dev/infiniband"):
            VerbsDevice()
    finally:
        Path("/dev/elsewhere").rename(NODES)


def test_a_user_who_may_not() -> None:
    nodes = list(NODES.glob("uverbs*"))
    for node in nodes:
        node.chmod(0o600)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            VerbsDevice()
        except VerbsUnavailable as error:
            os._exit(0 if "no permission to use rxa: this user (number 65534)" in str(error) else 2)
        finally:
            os._exit(1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        for node in nodes:
            node.chmod(0o666)


def test_the_doctor_opens_verbs_and_says_what_it_picked() -> None:
    (opened,) = [finding for finding in devices(os.environ).findings if finding.name == "verbs"]
    assert (opened.level, opened.value.split(":")[0]) == ("fine", "works")
    section = verbs({"TENSORWIRE_VERBS_PORT": "rxb"})
    assert section is not None
    findings = {finding.name: finding for finding in section.findings}
    assert all(finding.level == "fine" for finding in findings.values())
    assert "MTU 4096, messages of up to 8 MiB" in findings["rxa:1"].value
    assert findings["picked"].value.startswith("rxb:1: asked for by TENSORWIRE_VERBS_PORT; GID 1 (RoCE v2, 10.5.0.2")


def test_a_member_has_verbs_and_takes_shm_on_its_own_machine() -> None:
    secret = b"of one test"
    job = Coordinator(secret, workers=2, servers=0)
    members = [Member(job.address, secret, "worker", i, interface=ADDRESSES[i]) for i in range(2)]
    try:
        assert [set(member.devices) for member in members] == [{"shm", "tcp", "verbs"}] * 2
        assert members[0].channel("worker 1").device.name == "shm"
    finally:
        for each in (*members, job):
            each.close()
