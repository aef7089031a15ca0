"""Mistakes with which a model trains all the same are warned of, once a job, and only where they are made."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

import tensorwire as tw
from tests.harness.jobs import run_job


def warned(job: tw.Job, same: bool, rate: float, late: bool, train: bool) -> list[str]:
    torch.manual_seed(0 if same or late else job.rank)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(rate), torch.nn.Linear(8, 2)).train(train)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer = tw.torch.StoreOptimizer(net.named_parameters(), torch.optim.SGD, lr=0.1)
        other = tw.torch.StoreOptimizer([("p", torch.nn.Parameter(torch.zeros(2)))], torch.optim.SGD, lr=0.1)
        if late:
            torch.manual_seed(100 + job.rank)
        for step in range(4):
            optimizer.zero_grad()
            net(torch.full((3, 4), 1.0 + job.rank + step)).sum().backward()
            optimizer.step()
            other.step()
    return [str(w.message) for w in found]


@pytest.mark.parametrize(
    ("same", "rate", "late", "train", "says"),
    [
        (True, 0.5, False, True, True),
        (False, 0.5, False, True, False),
        (True, 0.0, False, True, False),
        (True, 0.5, True, True, False),  # seeded after the optimizer was constructed
        (True, 0.5, False, False, False),  # eval()
    ],
)
def test_the_same_dropout_masks_everywhere(same: bool, rate: float, late: bool, train: bool, says: bool) -> None:
    first, second = run_job(warned, same, rate, late, train).ok()
    assert second == []
    assert len(first) == int(says)
    if says:
        assert "torch.manual_seed(seed + job.rank)" in first[0]


def wrapped(job: tw.Job, use: bool) -> list[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = torch.nn.Linear(4, 2)
        ddp = torch.nn.parallel.DistributedDataParallel(net if use else torch.nn.Linear(4, 2))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                named = ddp.named_parameters() if use else net.named_parameters()
                tw.torch.StoreOptimizer(named, torch.optim.SGD, lr=0.1)
        return [str(w.message) for w in found]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("use", [True, False])
def test_a_model_left_in_distributed_data_parallel(use: bool) -> None:
    first, second = run_job(wrapped, use).ok()
    assert second == []
    assert len(first) == int(use)
    if use:
        assert first[0].startswith("the model is in DistributedDataParallel")
