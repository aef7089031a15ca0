"""Servers compute on the CPU, and leave accelerators alone."""

from __future__ import annotations

import os
from typing import Any

import torch

import tensorwire as tw
from tests.harness.jobs import run_job


def blind(parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
    """A rule, which counts the accelerators that its server is shown."""
    parameter.fill_(sum(os.environ.get(name) != "" for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")))


def step(job: tw.Job) -> float:
    net = torch.nn.Linear(1, 1, bias=False)
    optimizer = tw.torch.StoreOptimizer(net.named_parameters(), blind)
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return float(net.weight.detach())


def test_servers_are_shown_none() -> None:
    assert run_job(step, workers=1).ok() == [0.0]
