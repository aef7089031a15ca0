"""What the doctor says of RDMA: on machines that are only folders here."""

from __future__ import annotations

import resource
import sys

import pytest

import tensorwire.doctor.memory_limits as memory
from tensorwire.doctor import Finding
from tensorwire.doctor.rdma import verbs
from tests.harness.fakes import Sysfs
from tests.harness.fakes import library as library
from tests.harness.fakes import sysfs as sysfs

WANTED = {"TENSORWIRE_DEVICE": "verbs"}


def findings(sysfs: Sysfs, **environment: str) -> dict[str, Finding]:
    section = verbs(environment, sysfs.root, sysfs.ask)
    assert section is not None
    return {finding.name: finding for finding in section.findings}


def test_where_there_is_none_it_says_nothing(sysfs: Sysfs) -> None:
    assert verbs({}, sysfs.root, sysfs.ask) is None


@pytest.mark.usefixtures("library")
def test_ports_gids_and_the_one_that_is_picked(sysfs: Sysfs) -> None:
    sysfs.port("mlx5_0")
    sysfs.port("mlx5_1", state="1: DOWN")
    sysfs.port("rdmap0", kind="7: unspecified")
    found = findings(sysfs)
    assert found["mlx5_0:1"].value == "ACTIVE, Ethernet, 100 Gb/sec (4X EDR), MTU 4096, messages of up to 1 GiB"
    assert found["mlx5_0:1 GID 3"].value == "RoCE v2, 10.0.0.1, eth0"
    assert "GID 3" in found["picked"].value
    assert (found["mlx5_1:1"].level, found["mlx5_1:1"].value[:4]) == ("note", "DOWN")
    assert "no reliable connections" in found["rdmap0:1"].advice
    assert all(finding.level != "stops" for finding in found.values())


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("environment", [{}, WANTED])
def test_only_a_job_that_wants_verbs_stops_without(sysfs: Sysfs, environment: dict[str, str]) -> None:
    sysfs.port("mlx5_0", state="2: INIT")
    picked = findings(sysfs, **environment)["picked"]
    assert (picked.value, picked.level) == ("none", "stops" if environment else "note")
    assert "opensm" in picked.advice


@pytest.mark.usefixtures("library")
def test_a_port_that_was_asked_for_and_is_not_there_stops_every_job(sysfs: Sysfs) -> None:
    sysfs.port("mlx5_0")
    picked = findings(sysfs, TENSORWIRE_VERBS_PORT="mlx5_9")["picked"]
    assert picked.level == "stops"
    assert "there is mlx5_0:1" in picked.advice


def test_the_library_is_missing(sysfs: Sysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ibverbs", None)
    sysfs.port("mlx5_0")
    library = findings(sysfs)["library"]
    assert (library.value, library.level) == ("no", "note")
    assert "pip install '.[verbs]'" in library.advice


def test_what_may_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    assert memory._pinned().value == "8 MiB (only verbs would need it)"
    monkeypatch.setattr(memory, "has_active_port", lambda: True)
    monkeypatch.setattr(memory, "_capabilities", lambda: 0)
    assert "ulimit -l unlimited" in memory._pinned().advice
    assert memory._pinned().level == "note"
    monkeypatch.setattr(memory, "_capabilities", lambda: 1 << 14)
    assert "does not bind this process" in memory._pinned().value
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert memory._pinned().value.startswith("unlimited")
