"""``tensorwire bench store --part``, of training modes: what its programs check, and short runs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire.bench import key_modes, unequal
from tensorwire.bench.actors.key_pushes import KeyWorker
from tensorwire.bench.actors.lines import Run
from tensorwire.bench.actors.paced import PacedWorker
from tensorwire.bench.models import find
from tensorwire.bench.programs import Stage
from tests.bench.running import OURS, bench, peers
from tests.harness.jobs import run_job
from tests.harness.sandbox import Sandbox, nothing_kept

CORES = (0, 1)


def check_wrong_values(job: tw.Job) -> None:
    """A push that nobody has noted, and an element that has changed alone."""
    pushed = KeyWorker([8, 1030], "async")
    pushed.run(Run(1, 1, 2, "whole"))
    pushed._kv.push(1, torch.ones(1030).numpy())
    with pytest.raises(SystemExit, match="key 1 holds"):
        pushed._check()
    paced = PacedWorker(find("lstm"), "decoupled", 1e-4, "busy", job.rank)
    paced.run(Run(1, 1, 25))
    paced._params[-1].data[1] += 1.0
    with pytest.raises(SystemExit, match="other values within a bucket"):
        paced._check()


def test_wrong_values_are_seen() -> None:
    run_job(check_wrong_values, workers=1, device="shm").ok()


def check_values_of_two_workers(job: tw.Job, mode: str) -> None:
    """Rounds of steps that compute for next to no time, so that the pushes of both workers mix."""
    paced = PacedWorker(find("lstm"), mode, 1e-4, "busy", job.rank)
    for _ in range(50):
        paced.run(Run(1, 1, 5))  # values are checked in there


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssp", "decoupled"])
def test_values_are_accepted_however_pushes_mix(mode: str) -> None:
    run_job(check_values_of_two_workers, mode, workers=2, device="shm").ok()


def test_pushes_of_every_kind_arrive_once() -> None:
    contender = key_modes.contender("x", "128x4096", "async", "shm", workers=1)
    with nothing_kept(), Stage(contender, CORES) as stage:
        for word in ("list", "one", "turns", "whole"):
            server, worker = stage.run(1, 3, word)  # values are checked in there
            assert server["seconds"] == 0 < worker["seconds"]
            assert worker["registrations"] == 0 or word == "list"  # the first round's server has just begun
            assert ("p99_over_median" in worker) == (word == "turns")


@pytest.mark.slow
@pytest.mark.parametrize("who", [unequal.SSP, unequal.OURS])
def test_a_worker_is_slowed_and_goes_on(who: str) -> None:
    with nothing_kept(), Stage(unequal._contender(who, "lstm", "shm"), CORES) as stage:
        assert unequal._speed(stage, who, 0.2) > 0
        status = Path(f"/proc/{stage.programs[1].process.pid}/stat").read_text()
        assert status.rpartition(")")[2].split()[0] != "T"
    assert "slows a worker" not in [t.name for t in threading.enumerate()]


@pytest.mark.slow
def test_keys_of_every_mode(sandbox: Sandbox) -> None:
    _, records = bench(sandbox, *OURS, "store", "--part", "keys", "--workload", "tiny")
    assert peers(records, mode="pushpull", device="shm") == ["tensorwire", "tensorwire, ssp", "tensorwire, sync"]
    for record in records:
        assert (record["registrations"], record["target"] is None) == (0, target_of(record) is None)
        if record["mode"] == "push-to-answer":
            assert record["details"]["p99_over_median"] >= 1
            assert record["details"]["slowest_key_over_median"] >= 1


def target_of(record: dict[str, Any]) -> str | None:
    """Which records have one."""
    aimed = record["device"] == "shm" and record["mode"] in ("pushpull", "push-list")
    return "one" if aimed and record["peer"] == "tensorwire" else None


@pytest.mark.long
def test_unequal_workers(sandbox: Sandbox) -> None:
    _, records = bench(sandbox, *OURS, "store", "--part", "unequal", "--workload", "lstm", "--device", "shm")
    own = [unequal.FAST, unequal.SLOW, unequal.BOTH]
    assert peers(records) == ["tensorwire", unequal.SSP, unequal.SYNC, *own]
    speeds = {r["peer"]: r["details"]["samples_per_second"] for r in records}
    assert speeds[unequal.BOTH] == pytest.approx(speeds[unequal.FAST] + speeds[unequal.SLOW])


@pytest.mark.slow
@pytest.mark.usefixtures("only_link")
def test_diloco_over_a_link(sandbox: Sandbox) -> None:
    result, records = bench(
        sandbox, *OURS, "store", "--part", "diloco", "--workload", "lstm", "--link", "1gbit", "--rounds", "1"
    )
    if "skipped" in result.err:
        assert os.geteuid() != 0 or "needs" in result.err
        pytest.skip(result.err.strip())
    assert peers(records) == ["tensorwire", "tensorwire, sync"]
    for record in records:
        assert 0 < record["details"]["exposed_share"] < 1
    assert not list(Path("/run/netns").glob("tw-bench-*"))
