"""What keeps a process from RDMA is an error that says what to do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.fakes import FakeLibrary, Sysfs
from tests.harness.fakes import library as library
from tests.harness.fakes import sysfs as sysfs

import tensorwire.device.verbs.library
from tensorwire.device.verbs.library import load, open_device
from tensorwire.device.verbs.port_selection import select_port
from tensorwire.device.verbs.ports import query, scan_ports
from tensorwire.errors import VerbsUnavailable


def test_nothing_is_imported_before_somebody_asks() -> None:
    code = (
        "import sys, tensorwire.control\n"
        "from tensorwire.device.verbs import port_selection, ports\n"
        "ports.has_active_port(); sys.exit('ibverbs' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ibverbs", None)
    with pytest.raises(VerbsUnavailable, match=r"pip install '\.\[verbs\]'"):
        load()


def test_libibverbs_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ibverbs.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')\n")
    monkeypatch.delitem(sys.modules, "ibverbs", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):  # asked again, it says so again
        with pytest.raises(VerbsUnavailable, match=r"libibverbs\.so\.1.*install libibverbs1 and ibverbs-providers"):
            load()


def test_the_kernel_has_no_verbs(library: FakeLibrary, sysfs: Sysfs) -> None:
    library.not_listed = OSError(errno.ENOSYS, "Function not implemented")
    with pytest.raises(VerbsUnavailable, match="modprobe ib_uverbs"):
        open_device("mlx5_0", sysfs.root)
    library.not_listed = OSError(errno.ENOMEM, "Cannot allocate memory")
    with pytest.raises(VerbsUnavailable, match=r"cannot list.*allocate"):
        open_device("mlx5_0", sysfs.root)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where character devices are."""
    monkeypatch.setattr(tensorwire.device.verbs.library, "_CHARACTER_DEVICES", tmp_path)
    return tmp_path


def test_a_device_that_is_not_listed(library: FakeLibrary, sysfs: Sysfs, nodes: Path) -> None:
    with pytest.raises(VerbsUnavailable, match="no RDMA device mlx5_0 here"):
        open_device("mlx5_0", sysfs.root)
    sysfs.port("mlx5_0")
    with pytest.raises(VerbsUnavailable, match=r"mlx5_0: .*modprobe ib_uverbs"):
        open_device("mlx5_0", sysfs.root)
    sysfs.node("mlx5_0", "uverbs7")
    with pytest.raises(VerbsUnavailable, match=r"uverbs7 is missing: in a container.* --device /dev/infiniband"):
        open_device("mlx5_0", sysfs.root)
    (nodes / "uverbs7").touch()
    with pytest.raises(VerbsUnavailable, match="no driver for mlx5_0: install ibverbs-providers"):
        open_device("mlx5_0", sysfs.root)


def test_a_device_that_cannot_be_opened(
    library: FakeLibrary, sysfs: Sysfs, nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sysfs.port("mlx5_0")
    sysfs.node("mlx5_0", "uverbs7")
    (nodes / "uverbs7").touch()
    library.names, library.not_open = ["mlx5_0"], OSError(errno.ENOENT, "No such file or directory")
    with pytest.raises(VerbsUnavailable, match=r"mlx5_0 cannot be opened: .*No such file"):
        open_device("mlx5_0", sysfs.root)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may do everything
    with pytest.raises(
        VerbsUnavailable, match=rf"this user \(number {os.geteuid()}\) needs to read and write .*uverbs7"
    ):
        open_device("mlx5_0", sysfs.root)


def test_a_port_tells_its_limits_and_is_closed_again(library: FakeLibrary) -> None:
    library.names = ["mlx5_0"]
    answer = query("mlx5_0", 1)
    assert (answer.mtu, answer.max_message, [any(gid) for gid in answer.gids]) == (1024, 2**30, [True, False])
    with pytest.raises(VerbsUnavailable, match="mlx5_0:2 does not report its capabilities"):
        query("mlx5_0", 2)
    assert library.opened == 0


def test_no_device(sysfs: Sysfs) -> None:
    assert scan_ports(sysfs.root, sysfs.ask) == []
    with pytest.raises(VerbsUnavailable, match=r"no RDMA device here .*modprobe mlx5_ib.*rdma link add rxe0"):
        select_port([], environment={"TENSORWIRE_VERBS_PORT": "mlx5_0"})
