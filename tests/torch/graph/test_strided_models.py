"""Models in which operators make other strides than tracing says: their gradients are those of one process."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

import tensorwire as tw
from tensorwire.observe import counters
from tests.harness.jobs import run_job
from tests.torch.graph.lying import lie
from tests.torch.graph.training import wrong_gradients

NORM = {"": 0, "norm": 1}


class Swin(nn.Module):
    """The end of a Swin transformer: the mean over tokens behind a norm, whose gradient comes permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(torch.relu(self.a(x)))
        return self.head(nn.functional.adaptive_avg_pool1d(y.transpose(1, 2), 1).flatten(1))


def differing(
    model: nn.Module, x: list[torch.Tensor], workers: dict[str, int], place: bool = False, **options: Any
) -> list[str]:
    """What is not as one process computes the same graphs, in three steps."""
    alone = copy.deepcopy(model)
    if place:
        tw.torch.place(model, workers)
    else:
        options["workers"] = workers
    compiled = torch.compile(model, backend="tensorwire", options=options)
    reference = torch.compile(alone, backend="aot_eager")
    wrong = []
    for given in x:
        losses = [each(given).square().mean() for each in (compiled, reference)]
        for loss in losses:
            loss.backward()
        if not torch.equal(*losses):
            wrong.append("loss")
        wrong += wrong_gradients(model, alone)
    return wrong


def tokens(job: tw.Job, births: str, ways: list[tuple[bool, str]]) -> dict[str, list[str]]:
    """``ways``: whether the model is placed, and how tensors cross."""
    os.environ["TENSORWIRE_BIRTH"] = births
    wrong = {}
    for place, mode in ways:
        torch.compiler.reset()
        torch.manual_seed(0)
        wrong[f"{place} {mode}"] = differing(Swin(), [torch.randn(2, 64, 16) for _ in range(3)], NORM, place, mode=mode)
    return wrong


@pytest.mark.parametrize(
    ("device", "births", "ways"),
    [
        ("tcp", "on", [(False, "zerocopy"), (True, "zerocopy")]),
        pytest.param(
            "shm",
            "on",
            [(False, "zerocopy"), (True, "zerocopy"), (False, "copy")],
            marks=pytest.mark.long,
        ),
        pytest.param("shm", "off", [(False, "zerocopy")], marks=pytest.mark.long),
    ],
)
def test_the_mean_over_tokens(device: str, births: str, ways: list[tuple[bool, str]]) -> None:
    for wrong in run_job(tokens, births, ways, workers=2, servers=0, device=device).ok():
        assert wrong == {f"{place} {mode}": [] for place, mode in ways}


class Varying(nn.Module):
    """What crosses has other strides than traced, and a length that is known only when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(lie(self.a(x), [0, 1], [1, 0], 0))


def varying(job: tw.Job, most: int | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Varying()
    options = {"workers": {"": 0, "b": 1}}
    compiled = torch.compile(model, backend="tensorwire", options=options)
    reference = torch.compile(copy.deepcopy(model), backend="aot_eager")
    same, copies = [], []
    with torch.no_grad():
        for length in (5, 31, 2, 17, 8):
            x = torch.randn(length, 16)
            torch._dynamo.mark_dynamic(x, 0, **({"min": 2, "max": most} if most else {}))
            before = counters.snapshot()
            mine = compiled(x)
            copies.append(counters.since(before).copies)
            same.append(job.rank == 0 or torch.equal(mine, reference(x)))
    return {"same": same, "copies": copies[2:] if job.rank == 0 else []}


@pytest.mark.parametrize(
    ("most", "device"),
    [
        (64, "shm"),
        (None, "tcp"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(64, "tcp"), (None, "shm")]),
    ],
)
def test_lengths_that_vary(most: int | None, device: str) -> None:
    zero, one = run_job(varying, most, workers=2, servers=0, device=device).ok()
    assert zero["same"] == one["same"] == [True] * 5
    assert zero["copies"] == [1] * 3  # of the small output, for the caller; what is sent is born
