"""A process that is killed at any place of a step ends the job, which says who it was."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import tensorwire as tw
from tensorwire.observe import failpoints
from tensorwire.store import Async, DiLoCo, Sync
from tensorwire.store.modes import Mode
from tests.harness.jobs import run_job
from tests.levels import mostly_slow

STATES = {"worker": ("headed", "pushed", "answered_some"), "primary": ("reduced", "applied", "published_some")}
MODES = (Sync(), Async(), DiLoCo(every=1, quorum=1))
PLACES = [(role, state, mode) for mode in MODES for role, states in STATES.items() for state in states]


def train(job: tw.Job, role: str, state: str, mode: Mode) -> None:
    if role == "worker" and job.rank == 1:
        failpoints.fail_at("worker", 1, 2, state)
    p = torch.nn.Parameter(torch.zeros(3000))
    store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, bucket_bytes=4096, mode=mode, shards=2)
    for _ in range(50):
        p.grad = torch.ones_like(p)
        store.step()
        job.barrier()


@pytest.mark.parametrize(
    ("role", "state", "mode"), mostly_slow(PLACES, [p for p in PLACES if isinstance(p[2], Sync)]), ids=repr
)
def test_who_is_killed_is_named(role: str, state: str, mode: Mode) -> None:
    prepare = partial(failpoints.fail_at, "primary", 1, 2, state) if role == "primary" else None
    ended = run_job(train, role, state, mode, prepare=prepare)
    assert ended.cause is not None
    assert ended.cause.who == ("server 0" if role == "primary" else "worker 1")
    assert -9 in ended.codes
