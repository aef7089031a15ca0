"""Models that are cut over workers give the bits of one process: losses, gradients and buffers, over several steps.

One cut of one model; those marked long (``make test-long``) are more models and cuts, over three workers too,
and over all devices.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.harness.jobs import run_job
from tests.levels import long
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


MATRIX = itertools.product(zoo.ALL, range(3, 8), [2, 3], ["shm", "tcp"])


@pytest.mark.parametrize(("name", "seed", "workers", "device"), [("gru", 1, 2, "shm"), *map(long, MATRIX)])
def test_cut_over_workers(name: str, seed: int, workers: int, device: str) -> None:
    check(name, run_job(train, name, None, seed, workers=workers, servers=0, device=device).ok())
