"""However a program is cut, its losses, outputs and gradients have the bits of one process that runs the same graph.

Few programs; with those marked long (``make test-long``) they are a thousand.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

import tensorwire as tw
from tensorwire.graph import Analysis
from tests.harness.jobs import run_job
from tests.levels import mostly_long
from tests.torch.graph import cuts, watched, zoo
from tests.torch.graph.graphs import analyzed, run
from tests.torch.graph.together import Together
from tests.torch.graph.training import wrong_gradients

BATCH = 10


def some(few: int, many: int) -> list[Any]:
    """``many`` numbers, of which ``make test`` takes the first ``few``."""
    return [*range(few), *(pytest.param(i, marks=pytest.mark.long) for i in range(few, many))]


def cut(module: fx.GraphModule, seed: int, workers: int, copies: bool) -> Analysis:
    """Every operator on a worker that is drawn, or where nobody says."""
    draw, chosen = random.Random(seed), dict[str, str | None]()
    names = tuple(f"worker {i}" for i in range(workers))
    return analyzed(
        module, names, lambda node: chosen.setdefault(node.name, draw.choice((*names, None))), copies=copies
    )


def differing(results: Sequence[Any], right: Sequence[Any]) -> list[int]:
    """The numbers of the results with other bits or strides."""
    pairs = enumerate(zip(results, right, strict=True))
    return [i for i, (a, b) in pairs if not cuts.same_bits(a, b) or (a.numel() and a.stride() != b.stride())]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("batch", some(1, 100))
def test_random_programs(batch: int) -> None:
    """A failure shows the seed and the program."""
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        function, examples = cuts.program(seed, 3 + seed % 9)
        module = cuts.traced(cuts.with_gradients(function), examples)
        analysis = cut(module, seed, workers := 2 + seed % 2, copies=seed % 5 == 4)
        right = module(*examples)
        with Together(workers) as together:
            results = run(together, module, analysis, examples, transfers=watched.WatchedTransfers)
        assert [differing(mine, right) for mine in results] == [[]] * workers, f"seed {seed}:\n{module.code}"


@pytest.mark.parametrize("layout", cuts.LAYOUTS)
def test_every_operator_behind_every_layout(layout: str) -> None:
    """Each on worker 0, what reads its outputs on worker 1."""
    generator = torch.Generator().manual_seed(0)
    examples = [torch.randn(4, 6, 8, generator=generator), torch.randn(2, 3, 12, 12, generator=generator)]

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = [cuts.apply(case, values, layout, seed) for seed, case in enumerate(cuts.USABLE)]
        return tuple(torch.ops.aten.clone(one) for several in made for one in several)

    module = cuts.traced(function, examples)
    returned = {node.name for node in next(iter(reversed(module.graph.nodes))).args[0]}
    names = ("worker 0", "worker 1")
    analysis = analyzed(module, names, lambda node: names[node.name in returned])
    watched.seen.clear()
    with Together(2) as together:
        results = run(together, module, analysis, examples, transfers=watched.WatchedTransfers)
    right = module(*examples)
    assert [differing(mine, right) for mine in results] == [[], []]
    assert watched.seen["births"] >= 100


def compiled(job: tw.Job, seeds: Sequence[int]) -> list[str]:
    """The programs of these seeds as models in training: backward passes also send what forward passes kept."""
    wrong = []
    for seed in seeds:
        torch.compiler.reset()
        net = cuts.Net(seed, 3 + seed % 6)
        alone = copy.deepcopy(net)
        options = {"workers": net.workers(seed, job.num_workers), "outputs": "all"}
        mine = torch.compile(net, backend="tensorwire", options=options)
        reference = torch.compile(alone, backend="aot_eager")
        for step in range(3):
            examples = cuts.program(100 + step, 1)[1]
            results, right = mine(*examples), reference(*examples)
            results[0].backward()
            right[0].backward()
            wrong += [f"seed {seed}, step {step}: output {i}" for i in differing(results, right)]
            wrong += [f"seed {seed}, step {step}: gradient of {name}" for name in wrong_gradients(net, alone)]
    return wrong


class Text(torch.nn.Module):
    """A transformer whose batch and length may change from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(12, 8), torch.nn.Linear(8, 12)
        layers = (torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2))
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.tokens(tokens)
        for layer in self.layers:
            value = layer(value)
        return self.head(value).square().mean()


def changing(job: tw.Job, seed: int) -> list[str]:
    """A cut of a model by ``seed``, in training with batches and lengths that change."""
    wrong: list[str] = []
    torch.manual_seed(seed)
    net = Text()
    alone = copy.deepcopy(net)
    tw.torch.place(net, zoo.cut(net, job.num_workers, seed))
    mine = torch.compile(net, backend="tensorwire")
    for step, shape in enumerate([(2, 5), (3, 5), (3, 7), (5, 4), (2, 9)]):
        tokens = torch.randint(0, 12, shape)
        losses = [model(tokens) for model in (mine, alone)]
        for loss in losses:
            loss.backward()
        wrong += [f"step {step}: loss"] * (not torch.equal(*losses))
        wrong += [f"step {step}: gradient of {name}" for name in wrong_gradients(net, alone)]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("number", some(1, 9))
def test_batches_and_lengths_that_change(number: int) -> None:
    device, workers = [("shm", 2), ("shm", 3), ("tcp", 3)][number % 3]
    assert run_job(changing, number, workers=workers, servers=0, device=device).ok() == [[]] * workers


@pytest.mark.parametrize("number", some(1, 10))
@pytest.mark.parametrize(("device", "workers"), mostly_long([("shm", 2), ("tcp", 3)], [("tcp", 3)]))
def test_random_programs_that_are_compiled(device: str, workers: int, number: int) -> None:
    assert run_job(compiled, [workers + number], workers=workers, servers=0, device=device).ok() == [[]] * workers
