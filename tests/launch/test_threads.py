"""Threads of workers that share a machine."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from tensorwire.launch import threads
from tensorwire.launch.place import Place
from tensorwire.launch.threads import shared_cores, warn_if_crowded
from tests.harness.sandbox import Sandbox


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores, and a PyTorch that would use all of them."""
    monkeypatch.setattr(threads, "cores", lambda: 8)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda: 8))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workers", "environment", "added"),
    [
        (1, {}, {}),
        (2, {}, {"OMP_NUM_THREADS": "4"}),
        (3, {}, {"OMP_NUM_THREADS": "2"}),
        (20, {}, {"OMP_NUM_THREADS": "1"}),
        (2, {"OMP_NUM_THREADS": "7"}, {}),
        (2, {"MKL_NUM_THREADS": "7"}, {}),
        (2, {"OMP_NUM_THREADS": ""}, {"OMP_NUM_THREADS": "4"}),
    ],
)
def test_workers_share_the_cores(workers: int, environment: dict[str, str], added: dict[str, str]) -> None:
    assert shared_cores(environment, workers) == added


def place(workers: int, rank: int = 0, *, several: bool = False) -> Place:
    return Place("ranks", rank, workers, 1, "host:1", several)


@pytest.mark.parametrize(
    ("where", "environment", "workers"),
    [
        (place(2), {}, 2),
        (place(1), {}, 0),
        (place(2, 1), {}, 0),
        (place(2), {"OMP_NUM_THREADS": "8"}, 0),
        (place(8, several=True), {}, 0),  # nobody says how many are here
        (place(8, several=True), {"LOCAL_WORLD_SIZE": "4"}, 4),
        (place(8, several=True), {"SLURM_TASKS_PER_NODE": "3(x2),2"}, 3),
        (place(8, several=True), {"SLURM_TASKS_PER_NODE": "1(x8)"}, 0),
    ],
)
def test_too_many_threads_are_reported_once(
    where: Place, environment: dict[str, str], workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tensorwire"):
        assert warn_if_crowded(where, environment)
    told = [f"{workers} workers with 8 threads each share 8 cores"] * bool(workers)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == told
    if workers:
        assert caplog.text.strip().endswith(f"set OMP_NUM_THREADS={8 // workers}")


@pytest.mark.parametrize(("workers", "each"), [(2, 4), (16, 1)])
def test_the_least_they_can_use_is_no_crowd(
    workers: int, each: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda: each))  # type: ignore[arg-type]
    assert warn_if_crowded(place(workers), {})
    assert caplog.records == []


def test_without_torch_it_is_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert not warn_if_crowded(place(2), {})


def test_what_the_workers_of_a_job_are_given(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sandbox.environment.pop("OMP_NUM_THREADS", None)
    script = sandbox.script("print('threads', os.environ.get('OMP_NUM_THREADS'))")
    told = sandbox.run(script, "--servers", "0").finish().out
    assert told.count(f"threads {max(1, threads.cores() // 2)}\n") == 2
    sandbox.nothing_left()
