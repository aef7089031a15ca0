"""``tensorwire bench`` as people call it: real processes, short rounds, nothing left behind. No figure is judged."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tensorwire.bench.weights import TENSORS
from tensorwire.models import TINY
from tests.bench.running import OURS, bench, costs, peers
from tests.harness.sandbox import Program, Sandbox


def start(sandbox: Sandbox, *arguments: str) -> Program:
    return sandbox.start(sys.executable, *OURS, *arguments)


@pytest.mark.slow
def test_device(sandbox: Sandbox) -> None:
    _, records = bench(sandbox, *OURS, "device", "--sizes", "64,1MiB")
    # On mapped memory a write is one copy; a ping-pong is two writes. On tcp Tensorwire copies nothing. Neither asks or
    # registers anything.
    assert costs(records, device="shm", peer="tensorwire", mode="ping-pong") == {(2, 0, 0)}
    assert costs(records, device="shm", peer="tensorwire", mode="passive-target") == {(1, 0, 0)}
    assert costs(records, device="tcp", peer="tensorwire") == {(0, 0, 0)}
    # Which copy is the fastest depends on the processor.
    assert all(r["limit"].startswith("C ") for r in records if r["device"] == "shm")
    assert {r["limit"].partition(",")[0] for r in records if r["device"] == "tcp"} == {"C sockets"}
    built = {path.name.split("-")[0] for path in (sandbox.folder / "cache/tensorwire/bench").iterdir()}
    assert built == {"lock", "memory", "sockets"}


@pytest.mark.slow
def test_edge(sandbox: Sandbox) -> None:
    result, records = bench(sandbox, *OURS, "edge", "--sizes", "4KiB", "--markdown")
    assert peers(records, mode="transfer-mapped") == ["tensorwire", "C flag", "C memcpy"]
    assert peers(records, mode="whole-mapped") == peers(records, mode="whole") == ["tensorwire", "ends alone"]
    assert peers(records, mode="transfer")[:2] == ["tensorwire", "C sockets"]
    assert costs(records, peer="tensorwire") == {(0, 0, 0)}
    table = [line for line in result.out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(records)
    assert len({line.count("|") for line in table}) == 1


@pytest.mark.slow
def test_store(sandbox: Sandbox) -> None:
    _, records = bench(sandbox, *OURS, "store", "--workload", "tiny", "--device", "shm")
    pieces = len(TINY.tensors) + 2  # the plan cuts one into three
    assert {r["mode"]: r["copies"] for r in records} == {
        "step-copied": 2 * pieces,  # two workers
        "step-mapped": 0,
        "exchange-copied": 2 * pieces,
        "exchange-mapped": 0,
    }
    assert {(r["rpcs"], r["registrations"]) for r in records} == {(0, 0)}


@pytest.mark.slow
def test_faults(sandbox: Sandbox) -> None:
    _, records = bench(sandbox, *OURS, "faults")
    assert [r["mode"] for r in records] == ["killed"] * 8 + ["stopped"] * 2
    assert {r["device"] for r in records} == {"shm", "tcp"}


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


@pytest.mark.slow
def test_versions(sandbox: Sandbox) -> None:
    result, records = bench(sandbox, *OURS, "versions", "--device", "shm")
    modes = ["read-training", "read-idle", "commit", "step-published", "at-once-read"]
    if "skipped: files" not in result.err:
        modes += ["file-mapped", "file-loaded", "at-once-mapped"]
        assert costs(records, peer="tensorwire", mode="file-loaded") == {(0, 0, 0)}
        assert peers(records, mode="file-loaded") == ["tensorwire", "plain file"]
    assert {r["mode"] for r in records} == set(modes)
    (training,) = [r for r in records if (r["mode"], r["peer"]) == ("read-training", "tensorwire")]
    assert training["details"]["steps_per_second"] >= training["details"]["versions_per_second"] > 0
    assert costs(records, peer="tensorwire", mode="read-idle") == {(TENSORS, 0, 0)}
    (pause,) = [r for r in records if (r["mode"], r["peer"]) == ("commit", "tensorwire")]
    assert pause["details"] == {"pause": pause["seconds"], "copy": pause["limit_value"]}
    assert pause["target"] == "<= own copy + 50 ms"


@pytest.mark.slow
def test_versions_over_tcp(sandbox: Sandbox) -> None:
    _, records = bench(sandbox, *OURS, "versions", "--device", "tcp")
    assert costs(records, peer="tensorwire", mode="read-training") == {(0, 0, 0)}
    assert {r["mode"] for r in records if r["device"] == "tcp"} == {
        "read-training",
        "read-idle",
        "commit",
        "at-once-read",
    }


@pytest.mark.slow
def test_files(sandbox: Sandbox) -> None:
    result, records = bench(sandbox, *OURS, "files")
    modes = ["file-read", "step-loaded", "file-pushed"]
    if "skipped: mounts" not in result.err:
        modes += ["mount-here", "mount-warm", "mount-cold"]
        assert peers(records, mode="mount-cold") == ["tensorwire", "tmpfs"]
    assert {r["mode"] for r in records} == set(modes)
    assert costs(records, peer="tensorwire", mode="file-read", device="shm") == {(1, 0, 0)}
    assert peers(records, mode="file-pushed", device="tcp") == ["tensorwire", "KeyValue.push"]
    assert {r["bench"] for r in records} == {"files"}


def test_verbs_needs_rdma_and_says_so(sandbox: Sandbox) -> None:
    if Path("/sys/class/infiniband").exists():
        pytest.skip("there is RDMA here")
    result = start(sandbox, "device", "--device", "verbs", "--quick").finish()
    assert result.status == 1
    assert "rdma" in result.err.lower()
    assert len(result.err.splitlines()) <= 3
