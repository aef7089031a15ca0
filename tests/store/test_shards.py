"""A store of more shards than servers: each server has several, and the bits are those of as many servers."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire.errors import ArgumentError
from tensorwire.store import DiLoCo, LocalSGD
from tensorwire.store.fates import Begun
from tensorwire.store.modes import Mode
from tensorwire.trace.push_fates import problems, read_fates
from tests.harness.jobs import run_job
from tests.store.test_bits import BUCKET, assert_same, gradient, parameters, rate, reference

ADAM: dict[str, Any] = {"lr": 1e-2, "amsgrad": True}


def take_steps(
    job: tw.Job, store: tw.torch.StoreOptimizer, params: dict[str, torch.nn.Parameter], steps: range
) -> None:
    for step in steps:
        for group in store.param_groups:
            group["lr"] = rate(step, ADAM["lr"])
        for name, p in params.items():
            p.grad = gradient(name, p.shape, p.dtype, job.rank, step)
        store.step()
    store.wait()


def train(job: tw.Job, shards: int | None, more: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The parameters after three steps, between two of which the state is loaded, and where each bucket is."""
    params = parameters(torch.float32, job.rank, "Adam")

    def made() -> tw.torch.StoreOptimizer:
        return tw.torch.StoreOptimizer(
            params.items(), torch.optim.Adam, bucket_bytes=BUCKET, shards=shards, **ADAM, **more
        )

    store = made()
    take_steps(job, store, params, range(2))
    state = copy.deepcopy(store.state_dict())
    store.load_state_dict(state)
    take_steps(job, store, params, range(2, 3))
    client = store._stores[0].client
    where = [(b.shard_number, b.index, b.space, b.shard, b.nbytes) for b in client.order]
    assert {b.shard_number % job.num_servers for b in client.order} == {b.server for b in client.order}
    return {name: p.detach().clone() for name, p in params.items()}, where


@pytest.mark.parametrize(
    ("device", "more"),
    [("shm", {}), ("shm", {"max_grad_norm": 1.0, "overlap": True}), ("tcp", {"max_grad_norm": 1.0})],
    ids=repr,
)
def test_four_shards_on_two_servers_train_with_the_bits_of_four_servers(device: str, more: dict[str, Any]) -> None:
    ours = run_job(train, 4, more, servers=2, device=device).ok()
    theirs = run_job(train, None, more, servers=4, device=device).ok()
    for (mine, places), (other, expected) in zip(ours, theirs, strict=True):
        assert places == expected
        assert_same(mine, other, more)
        if not more:
            assert_same(mine, reference(2, "Adam", ADAM, "float32"), more)


def exchange(job: tw.Job, mode: Mode, shards: int | None) -> list[float]:
    p = torch.nn.Parameter(torch.zeros(6000))
    store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, bucket_bytes=4096, mode=mode, shards=shards)
    for step in range(4):
        p.grad = torch.arange(6000.0) * (step + job.rank)
        store.step()
    store.wait()
    return [*p.tolist(), *store.shared_state()["p"].tolist()]


@pytest.mark.parametrize("mode", [LocalSGD(every=2), DiLoCo(every=1, quorum=2)], ids=repr)
def test_three_shards_on_two_servers_exchange_as_on_three(mode: Mode, tmp_path: Path) -> None:
    found = []
    for servers, shards in ((2, 3), (3, None)):
        folder = tmp_path / str(servers)
        found.append(run_job(exchange, mode, shards, servers=servers, fates=folder).ok())
        lines = read_fates([folder])
        assert problems(lines) == []
        logs = Counter(line.process for line in lines if isinstance(line, Begun))
        assert sum(logs[f"server {s}"] for s in range(servers)) == 3
    assert found[0] == found[1]


def refused(job: tw.Job) -> list[str]:
    texts = []
    for shards in (1, True, "4", 1 << 20):
        p = torch.nn.Parameter(torch.zeros(3))
        with pytest.raises(ArgumentError) as caught:
            tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, shards=shards)  # type: ignore[arg-type]
        texts.append(str(caught.value))
    return texts


def test_numbers_of_shards_that_leave_servers_without_one_are_refused() -> None:
    for texts in run_job(refused, servers=2).ok():
        assert texts == [
            f"shards must be a whole number from 2, for 2 servers, to 65536, not {shards!r}"
            for shards in (1, True, "4", 1 << 20)
        ]
