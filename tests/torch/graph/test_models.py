"""Models that are cut over workers give the bits of one process: losses, gradients and buffers, over several steps.

One cut of each kind of model; those marked long (``make test-long``) are more models and cuts, over three workers too,
and over all devices.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.jobs import run_job
from tests.levels import mostly_long
from tests.torch.graph import zoo
from tests.torch.graph.training import gradients_of, train


def check(name: str, results: list[dict[str, Any]]) -> None:
    """Nothing differs, every gradient is on one worker, and a step in the steady state asks and registers nothing.

    It makes the copies that its plans predict: none where no edge is copied.
    """
    assert [result["wrong"] for result in results] == [[] for _ in results]
    here = [path for result in results for path in result["here"]]
    assert sorted(here) == sorted(gradients_of(name))
    for result in results:
        counted = result["counted"]
        assert (counted["rpcs"], counted["registrations"], counted["copies"]) == (0, 0, result["planned"])
        if not result["copied"]:
            assert counted["copies"] == 0


@pytest.mark.parametrize("name", mostly_long(["gru", "inception", "gpt2", "t5", "mixtral"], ("gru",)))
def test_cut_over_two_workers(name: str) -> None:
    check(name, run_job(train, name, None, 1, workers=2, servers=0, device="shm").ok())


@pytest.mark.long
def test_cut_over_three_workers_over_tcp() -> None:
    check("llama", run_job(train, "llama", None, 2, workers=3, servers=0, device="tcp").ok())


@pytest.mark.long
@pytest.mark.parametrize("device", ["shm", "tcp"])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("seed", range(3, 8))
@pytest.mark.parametrize("name", zoo.ALL)
def test_the_full_matrix(name: str, seed: int, workers: int, device: str) -> None:
    check(name, run_job(train, name, None, seed, workers=workers, servers=0, device=device).ok())
