"""RDMA devices of the tests: a folder that looks as the kernel's does, and a stand-in for the module ibverbs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tensorwire.device.verbs.ports import PortAttributes

Table = Mapping[int, tuple[str, str, str]]  # by index: address, type, interface

MTU, MAX_MESSAGE = 4096, 2**30
ROCE: Table = {
    0: ("fe80::1", "IB/RoCE v1", "eth0"),
    1: ("fe80::1", "RoCE v2", "eth0"),
    2: ("10.0.0.1", "IB/RoCE v1", "eth0"),
    3: ("10.0.0.1", "RoCE v2", "eth0"),
}


class Sysfs:
    """Ports are added to ``root``, which stands for ``/sys/class/infiniband``."""

    def __init__(self, path: Path) -> None:
        self.root = path / "infiniband"
        self.tables: dict[tuple[str, int], list[bytes]] = {}

    def ask(self, device: str, number: int) -> PortAttributes:
        """What libibverbs would say."""
        return PortAttributes(MTU, MAX_MESSAGE, self.tables[device, number])

    def port(
        self,
        device: str,
        number: int = 1,
        gids: Table = ROCE,
        *,
        state: str = "4: ACTIVE",
        layer: str = "Ethernet",
        lid: int = 0,
        kind: str = "1: CA",
    ) -> Path:
        """Another port."""
        path = self.root / device / "ports" / str(number)
        values = {"state": state, "link_layer": layer, "lid": hex(lid), "rate": "100 Gb/sec (4X EDR)"}
        self.tables[device, number] = [_gid(gids[i][0] if i in gids else "::") for i in range(max(gids, default=0) + 2)]
        for index, (_, type_, interface) in gids.items():
            values[f"gid_attrs/types/{index}"] = type_
            if layer == "Ethernet":
                values[f"gid_attrs/ndevs/{index}"] = interface
        for name, value in values.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(value + "\n")
        (self.root / device / "node_type").write_text(kind + "\n")
        return path

    def net(self, device: str, interface: str, number: int = 1) -> None:
        """IP over InfiniBand on a port."""
        path = self.root / device / "device/net" / interface
        path.mkdir(parents=True)
        (path / "dev_port").write_text(f"{number - 1}\n")

    def node(self, device: str, name: str = "uverbs0") -> None:
        """The character device of an RDMA device."""
        path = self.root.with_name("infiniband_verbs") / name
        path.mkdir(parents=True)
        (path / "ibdev").write_text(device + "\n")


def _gid(text: str) -> bytes:
    address = ip_address(text)
    return (bytes(10) + b"\xff\xff" if address.version == 4 else b"") + address.packed


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    """A kernel without RDMA devices, until some are added."""
    return Sysfs(tmp_path)


class FakeLibrary(ModuleType):
    """The module ibverbs: ``devices`` by name, or the errors of listing and opening."""

    def __init__(self) -> None:
        super().__init__("ibverbs")
        self.__version__ = "1"
        self.names: list[str] = []
        self.not_listed: OSError | None = None
        self.not_open: OSError | None = None
        self.opened = 0

    def get_device_list(self) -> list[SimpleNamespace]:
        """As the real one, which raises ENOSYS where the kernel's half is missing."""
        if self.not_listed:
            raise self.not_listed
        return [SimpleNamespace(name=name, open=self.open) for name in self.names]

    def open(self) -> FakeLibrary:
        """The context is the library itself."""
        if self.not_open:
            raise self.not_open
        self.opened += 1
        return self

    def query_port(self, number: int) -> SimpleNamespace:
        """Port 1 is all there is."""
        if number != 1:
            raise OSError(22, "Invalid argument")
        return SimpleNamespace(active_mtu=3, max_msg_sz=2**30, gid_tbl_len=2)

    def query_gid(self, number: int, index: int) -> SimpleNamespace:
        """The second place is empty."""
        if index == 1:
            raise OSError(61, "No data available")
        return SimpleNamespace(raw=_gid("10.0.0.1"))

    def close(self) -> None:
        """As often as opened."""
        self.opened -= 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """In place of ibverbs."""
    made = FakeLibrary()
    monkeypatch.setitem(sys.modules, "ibverbs", made)
    return made
