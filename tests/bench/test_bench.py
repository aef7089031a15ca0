"""``tensorwire bench`` as people call it: real processes, short rounds, nothing left behind. No figure is judged."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tensorwire.bench.records import MODES, Record
from tests.sandbox import Program, Result, Sandbox

FIELDS = {
    "bench": str,
    "device": str,
    "peer": str,
    "mode": str,
    "workload": str,
    "bytes": int,
    "seconds": float,
    "bytes_per_second": (float, type(None)),
    "limit": (str, type(None)),
    "limit_value": (float, type(None)),
    "ratio": (float, type(None)),
    "copies": (float, int, type(None)),
    "rpcs": (float, int, type(None)),
    "registrations": (float, int, type(None)),
}


def start(sandbox: Sandbox, *arguments: str) -> Program:
    return sandbox.launch("bench", *arguments, XDG_CACHE_HOME=str(sandbox.folder / "cache"))


def bench(sandbox: Sandbox, *arguments: str) -> tuple[Result, list[dict[str, Any]]]:
    """Runs it, and reads what it has written."""
    file = sandbox.folder / "figures.json"
    result = start(sandbox, *arguments, "--quick", "--json", str(file)).finish()
    assert result.status == 0, result.err
    sandbox.nothing_left()
    records = json.loads(file.read_text())
    assert records
    for record in records:
        validate(record, records)
        assert record["workload"] in result.out
    return result, records


def validate(
    record: dict[str, Any], records: list[dict[str, Any]], pinned: str = "pinned: initiator on processor"
) -> None:
    """A record is complete and agrees with itself and with its limit's own record."""
    for name, kind in FIELDS.items():
        assert isinstance(record[name], kind), (name, record)
    assert set(record) == {*FIELDS, *Record.__dataclass_fields__, "machine"}
    assert record["mode"] in MODES
    assert 0 < record["low"] <= record["seconds"] <= record["high"]
    assert pinned in record["machine"]
    if record["limit"] is not None:
        same = [r for r in records if (r["workload"], r["mode"]) == (record["workload"], record["mode"])]
        (limit,) = [r for r in same if r["peer"] == record["limit"]]
        assert record["limit_value"] == limit["seconds"]
        assert record["ratio"] in (None, limit["seconds"] / record["seconds"])  # None: this machine is busy
        assert (record["ratio"] is None) == ("this machine is busy" in record["machine"])
    assert (record["target"] is None) <= (record["met"] is None)


def ours(records: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The one record of ours with these fields."""
    (found,) = [r for r in records if r["peer"] == "tensorwire" and wanted.items() <= r.items()]
    return found


@pytest.mark.slow
def test_device(sandbox: Sandbox) -> None:
    result, records = bench(sandbox, "device", "--sizes", "64,1MiB", "--peers", "zeromq", "--peer-python", "/bin/false")
    # On mapped memory a write is one copy; on tcp Tensorwire copies nothing. Neither asks nor registers anything.
    for device, copies in (("shm", 1), ("tcp", 0)):
        for record in records:
            if record["device"] == device and record["peer"] == "tensorwire":
                assert (record["copies"], record["rpcs"], record["registrations"]) == (copies, 0, 0) or (
                    record["mode"] == "ping-pong" and record["copies"] == 2  # there and back
                )
    assert ours(records, device="shm", bytes=64)["mode"] == "ping-pong"
    assert ours(records, device="tcp", bytes=64, mode="passive-target")["target"] == ">= 2.00 of C sockets"
    divided = ours(records, device="tcp", bytes=64, mode="waiting-target")["details"]
    assert divided.keys() == {"calling", "waiting", "sleeps", "wake_ups"}
    assert 0 < divided["calling"] < divided["calling"] + divided["waiting"]
    assert "tcp write + completion, 64 B, passive-target, tensorwire: " in result.out
    assert " in write(), " in result.out
    assert "C sockets, polling" in {r["peer"] for r in records}
    assert ours(records, device="shm", bytes=2**20)["limit"] == "C memcpy"
    assert "C sockets" in {r["peer"] for r in records}
    assert "skipped: zeromq is not here: pip install pyzmq" in result.err
    assert [p.name.split("-")[0] for p in sorted((sandbox.folder / "cache/tensorwire/bench").iterdir())][-2:] == [
        "memory",
        "sockets",
    ]


@pytest.mark.slow
def test_edge(sandbox: Sandbox) -> None:
    result, records = bench(sandbox, "edge", "--sizes", "4KiB", "--peer-python", "/bin/false", "--markdown")
    for device, modes in (("shm", ("transfer-mapped", "whole-mapped")), ("tcp", ("transfer", "whole"))):
        for mode in modes:
            made = [r for r in records if (r["device"], r["mode"]) == (device, mode)]
            assert [r["peer"] for r in made][:3] == ["tensorwire", "tensorwire, bounded", "tensorwire, dynamic"]
            assert {(r["copies"], r["rpcs"], r["registrations"]) for r in made[:3]} == {(0, 0, 0)}
            assert {r["bytes_per_second"] is None for r in made} == {device == "shm"}
            assert ("no byte moved" in made[0]["workload"]) == (device == "shm")
            assert {r["peer"].partition(",")[0] for r in made[3:]} == (
                {"ends alone"} if "whole" in mode else {"C flag", "C memcpy"} if device == "shm" else {"C sockets"}
            )
    assert ours(records, mode="transfer-mapped")["target"] == "<= 2 us and >= 25.00 of grpc"
    assert ours(records, mode="whole-mapped")["target"] == ">= 20.00 of grpc"
    assert "skipped: grpc is not here: pip install grpcio" in result.err
    for line in ("tensorwire: static edge of two slots", "tensorwire, dynamic: dynamic edge; a lease a tensor"):
        assert line in result.out
    table = [line for line in result.out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(records)
    assert {line.count("|") for line in table} == {10}


@pytest.mark.slow
def test_waiting(sandbox: Sandbox) -> None:
    _, records = bench(sandbox, "device", "--waiting", "--rounds", "1")
    assert [(r["device"], r["mode"], r["target"]) for r in records] == [
        ("shm", "idle", "<= 50 ms"),
        ("tcp", "idle", "<= 50 ms"),
    ]


@pytest.mark.slow
def test_faults(sandbox: Sandbox) -> None:
    _, records = bench(sandbox, "faults", "--rounds", "1")
    assert [r["mode"] for r in records] == ["killed"] * 8 + ["stopped"] * 2
    assert {r["device"] for r in records} == {"shm", "tcp"}
    assert "heartbeat 0.1 s, lost after 1 s" in records[-1]["workload"]


@pytest.mark.slow
@pytest.mark.usefixtures("only_link")
def test_link(sandbox: Sandbox) -> None:
    file = sandbox.folder / "figures.json"
    arguments = ("--link", "1gbit", "--rounds", "1", "--quick", "--json", str(file))
    result = start(sandbox, "device", *arguments).finish()
    assert result.status == 0
    sandbox.nothing_left()
    if "skipped" in result.err:
        assert "--link 1gbit: " in result.err
        pytest.skip(result.err.strip())
    records = json.loads(file.read_text())
    assert [(r["peer"], r["mode"]) for r in records] == [
        ("tensorwire", "one-way"),
        ("iperf3", "one-way"),
        ("tensorwire", "both-ways"),
        ("iperf3", "both-ways"),
        ("iperf3 --bidir", "both-ways"),
    ]
    assert all("1gbit" in r["workload"] for r in records)
    assert not list(Path("/run/netns").glob("tw-bench-*"))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing(sandbox: Sandbox, number: int, status: int) -> None:
    program = start(sandbox, "device", "--device", "tcp", "--sizes", "64", "--rounds", "1000")
    while not any("bench.actors.transfer" in command for command in sandbox.processes().values()):
        assert program.process.poll() is None
    program.signal(number)
    result = program.finish()
    assert result.status == status
    assert "Traceback" not in result.err
    sandbox.nothing_left()


def test_posting(sandbox: Sandbox) -> None:
    pytest.importorskip("ibverbs", reason="needs libibverbs, though no NIC", exc_type=ImportError)
    _, records = bench(sandbox, "posting")
    assert [(r["mode"], r["peer"]) for r in records] == [
        ("posted", "tensorwire"),
        ("posted", "ibverbs alone"),
        ("one-by-one", "tensorwire"),
        ("batched", "tensorwire"),
    ]
    assert {(r["copies"], r["registrations"]) for r in records} == {(0, 0)}
    assert records[0]["target"] == "<= 3 us"


def test_verbs_needs_rdma_and_says_so(sandbox: Sandbox) -> None:
    if Path("/sys/class/infiniband").exists():
        pytest.skip("there is RDMA here")
    result = start(sandbox, "device", "--device", "verbs", "--quick").finish()
    assert result.status == 1
    assert "rdma" in result.err.lower()
    assert len(result.err.splitlines()) <= 3
    result = start(sandbox, "device", "--listen", "127.0.0.1:0").finish()
    assert "--device verbs" in result.err
