"""``python -m benchmarks store --part``: what its programs check, and short runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorwire as tw
from benchmarks import keys, rows
from benchmarks.actors.key_pushes import KeyWorker
from benchmarks.actors.paced import PacedWorker
from benchmarks.libraries import GRPC_ROWS, Libraries
from tensorwire.bench.actors.lines import Run
from tensorwire.bench.programs import Stage
from tensorwire.bench.show import Notes
from tensorwire.models import find
from tests.bench.running import BESIDE, bench, peers
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
    paced = PacedWorker(find("lstm"), "diloco", 1e-4, job.rank)
    paced.run(Run(1, 1, 25))
    paced._params[-1].data[1] += 1.0
    with pytest.raises(SystemExit, match="other values within a bucket"):
        paced._check()


def test_wrong_values_are_seen() -> None:
    run_job(check_wrong_values, workers=1, device="shm").ok()


def test_pushes_of_every_kind_arrive_once() -> None:
    contender = keys.contender("x", "128x4096", "async", "shm", workers=1)
    with nothing_kept(), Stage(contender, CORES) as stage:
        for word in ("list", "one", "turns", "whole"):
            server, worker = stage.run(1, 3, word)  # values are checked in there
            assert server["seconds"] == 0 < worker["seconds"]
            assert worker["registrations"] == 0 or word == "list"  # the first round's server has just begun
            assert ("p99_over_median" in worker) == (word == "turns")


@pytest.mark.slow
def test_rows_are_the_same_on_grpc() -> None:
    peer = Libraries(None, Notes(print, print)).program(GRPC_ROWS)
    _, theirs = rows.workload("tcp", 20_000, peer=peer).contenders
    with nothing_kept(), Stage(theirs, CORES) as stage:
        assert stage.run(1, 3)[-1]["seconds"] > 0  # values are checked in there


@pytest.mark.slow
def test_rows_that_are_pushed_arrive_once() -> None:
    (contender,) = rows.workload("tcp", 20_000).contenders
    with nothing_kept(), Stage(contender, CORES) as stage:
        *_, worker = stage.run(1, 3)  # values are checked in there
        assert worker["seconds"] > 0
        assert 0.8 < worker["bytes_over_rows"] <= 1.1  # rows that are named twice travel once


@pytest.mark.slow
def test_keys_of_every_mode(sandbox: Sandbox) -> None:
    _, records = bench(sandbox, *BESIDE, "store", "--part", "keys", "--workload", "tiny")
    assert peers(records, mode="pushpull", device="shm") == ["tensorwire", "tensorwire, ssp", "tensorwire, sync"]
    for record in records:
        assert (record["registrations"], record["target"] is None) == (0, target_of(record) is None)
        if record["mode"] == "push-to-answer":
            assert record["details"]["p99_over_median"] >= 1
            assert record["details"]["slowest_key_over_median"] >= 1


def target_of(record: dict[str, Any]) -> str | None:
    """Which records have one."""
    if record["mode"] == "push-to-answer":
        return "one" if ", 1 worker," in record["workload"] else None
    aimed = record["device"] == "shm" and record["mode"] in ("pushpull", "push-list")
    return "one" if aimed and record["peer"] == "tensorwire" else None


@pytest.mark.slow
@pytest.mark.usefixtures("only_link")
def test_diloco_over_a_link(sandbox: Sandbox) -> None:
    result, records = bench(
        sandbox, *BESIDE, "store", "--part", "diloco", "--workload", "lstm", "--link", "1gbit", "--rounds", "1"
    )
    if "skipped" in result.err:
        assert os.geteuid() != 0 or "needs" in result.err
        pytest.skip(result.err.strip())
    assert peers(records) == ["tensorwire", "tensorwire, sync"]
    for record in records:
        assert 0 < record["details"]["exposed_share"] < 1
    assert not list(Path("/run/netns").glob("tw-bench-*"))
