"""The copies that a plan predicts for a step are those that a step makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import tensorwire as tw
from tensorwire.graph.plan import Plan
from tensorwire.observe import counters
from tensorwire.torch.graph.execution.job_group import group_of
from tensorwire.torch.graph.planning.plan_model import plan_model
from tensorwire.torch.graph.planning.trace_model import trace_model
from tests.harness.jobs import run_job
from tests.torch.graph import zoo

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
WIDTH = 32


class Text(nn.Module):
    """A model of transformers that takes its tensors in order, and returns all that it has to say."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = zoo.build(name)

    def forward(self, text: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        said = self.inner(input_ids=text, labels=labels)
        return tuple(value for value in said.values() if isinstance(value, torch.Tensor))


class Experts(nn.Module):
    """As in examples/experts.py: how many tokens an expert gets is known only then."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 1)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = torch.softmax(self.gate(tokens), 1)
        chosen, mixed = weights.argmax(1), torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = torch.nonzero(chosen == number).squeeze(1)
            mixed = mixed.index_add(0, mine, expert(tokens[mine]) * weights[mine, number].unsqueeze(1))
        return (self.head(tokens + mixed).square().mean(),)


def _text(name: str, step: int) -> tuple[torch.Tensor, ...]:
    return tuple(zoo.inputs(name, step).values())


def _tokens(step: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(step)),)


Case = tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, ...]], dict[str, int]]
A, B = 0, 1
WORKERS = {
    "t5": {"": A, "inner.decoder": B, "inner.lm_head": B},
    "mixtral": {"": A, "inner.model.layers.1": B},
    "gpt2": {"": A, "inner.transformer.h.1": B},
}
CASES: dict[str, Case] = {
    "experts": (Experts, _tokens, {"": A, "experts.1": B}),
    **{name: (partial(Text, name), partial(_text, name), workers) for name, workers in WORKERS.items()},
}


def predicted(these: list[Plan], worker: str) -> tuple[int, int]:
    """Copies and bytes of ``worker`` in a step that runs each of these plans once."""
    ours = [copies for plan in these for copies in plan.copies if copies.worker == worker]
    return sum(copies.count for copies in ours), sum(copies.nbytes for copies in ours)


def count(job: tw.Job, name: str) -> dict[str, tuple[int, int]]:
    """Copies and bytes of the last of some steps, and those that its plans predict."""
    make, inputs, workers = CASES[name]
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    torch.manual_seed(0)
    compiled = torch.compile(make(), backend="tensorwire", options={"workers": workers})
    made = counters.since(counters.snapshot())
    for step in range(5):
        before = counters.snapshot()
        compiled(*inputs(step))[0].backward()
        made = counters.since(before)
    group = group_of(job._worker)
    return {
        "made": (made.copies, made.copied_bytes),
        "planned": predicted([plan for plan, _ in group.made], group.me),
    }


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("experts", "shm"),
        pytest.param("t5", "shm", marks=pytest.mark.long),
        pytest.param("mixtral", "tcp", marks=pytest.mark.long),
        pytest.param("gpt2", "tcp", marks=pytest.mark.long),
    ],
)
def test_a_step_makes_the_copies_that_its_plan_predicts(name: str, device: str) -> None:
    results = run_job(count, name, workers=2, servers=0, device=device).ok()
    for result in results:
        made, planned = result["made"], result["planned"]
        assert made[0] == planned[0]
        if name != "experts":  # the bytes of what has any size are not known before
            assert made[1] == planned[1]
    if name == "gpt2":  # and so they are planned without a job
        make, inputs, workers = CASES[name]
        before = [planned.analysis.plan for planned in plan_model(trace_model(make, lambda: inputs(0)), 2, workers)]
        assert [result["planned"] for result in results] == [predicted(before, worker) for worker in before[0].workers]
        for plan in before:
            written = json.loads(json.dumps(plan.to_json()))["copies"]
            assert [one["worker"] for one in written] == [one.worker for one in plan.copies]
            assert all(one["count"] == one["sent"] + one["received"] for one in written)
