"""Devices by name: Tensorwire's own, and those that installed packages add."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tensorwire.device import LoopbackDevice, ShmDevice, TcpDevice, VerbsDevice, device_names, find_device
from tensorwire.device.registry import AUTO, find_job_device
from tensorwire.errors import ArgumentError

OURS = {"loopback": LoopbackDevice, "shm": ShmDevice, "tcp": TcpDevice, "verbs": VerbsDevice}
# A module with devices of all kinds; a test's package names one of them.
MODULE = """
from tensorwire.device import Device, LoopbackDevice, TcpDevice

class Fax(TcpDevice):
    name = "fax"

class Inner(LoopbackDevice):
    name = "inner"

class Incomplete(Device):
    name = "fax"

def make():
    return Fax()
"""


class Packages:
    """Packages that are installed in a folder of the path, each with one entry point."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "faxes.py").write_text(MODULE)
        (folder / "broken_fax.py").write_text("raise OSError('no modem here')\n")

    def add(self, name: str, value: str, package: str = "faxes") -> None:
        """Installs ``package``."""
        info = self.folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[tensorwire.devices]\n{name} = {value}\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    """None is there until a test adds it."""
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("faxes", "broken_fax"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return Packages(tmp_path)


def test_our_own() -> None:
    assert {name: find_device(name) for name in OURS} == OURS
    assert device_names()[:4] == list(OURS)
    assert [find_job_device(name) for name in ("shm", "tcp", "verbs")] == [ShmDevice, TcpDevice, VerbsDevice]


def test_a_package_adds_one(packages: Packages) -> None:
    packages.add("fax", "faxes:Fax")
    assert device_names() == [*OURS, "fax"]
    assert "faxes" not in sys.modules, "a package was imported although nobody wants its device"
    kind = find_device("fax")
    assert (kind.name, kind.__module__, find_job_device("fax")) == ("fax", "faxes", kind)
    with kind.for_job(interface="127.0.0.1", heartbeat=0.5, lost_after=5.0) as device:
        assert device.name == "fax"
        assert device.allocate(8).remote().device == "fax"


def test_our_own_names_cannot_be_taken(packages: Packages) -> None:
    packages.add("tcp", "faxes:Fax")
    packages.add(AUTO, "faxes:Fax", "other")
    assert find_device("tcp") is TcpDevice
    assert device_names() == list(OURS)


@pytest.mark.parametrize("find", [find_device, find_job_device])
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("fax", "broken_fax:Fax", r"package faxes, broken_fax:Fax\) cannot be imported: OSError: no modem here"),
        ("fax", "faxes:Telex", r"faxes:Telex\) cannot be imported: AttributeError"),
        ("fax", "faxes:make", "not a complete subclass"),
        ("fax", "faxes:Incomplete", "not a complete subclass"),
        ("telex", "faxes:Fax", "needs the class attributes name = 'telex'"),
        ("facsimile", "faxes:Fax", "1 to 8 lower-case letters"),
        ("Fax", "faxes:Fax", "1 to 8 lower-case letters"),
    ],
)
def test_what_is_no_device_is_refused(packages: Packages, find: object, name: str, value: str, why: str) -> None:
    packages.add(name, value)
    assert callable(find)
    with pytest.raises(ArgumentError, match=why):
        find(name)


def test_two_packages_with_one_name(packages: Packages) -> None:
    packages.add("fax", "faxes:Fax")
    packages.add("fax", "faxes:Inner", "others")
    with pytest.raises(ArgumentError, match=r"two packages have a device 'fax': .*faxes.* and .*others"):
        find_device("fax")


def test_a_job_needs_other_processes(packages: Packages) -> None:
    packages.add("inner", "faxes:Inner")
    assert find_device("inner").name == "inner"
    for name in ("inner", "loopback"):
        with pytest.raises(ArgumentError, match="does not reach other processes"):
            find_job_device(name)


def test_a_name_that_nobody_has(packages: Packages) -> None:
    packages.add("fax", "faxes:Fax")
    with pytest.raises(ArgumentError, match="there is no device 'telex': use one of loopback, shm, tcp, verbs, fax"):
        find_device("telex")
    with pytest.raises(ArgumentError, match="device must be one of auto, shm, tcp, verbs, fax, not 'telex'"):
        find_job_device("telex")
