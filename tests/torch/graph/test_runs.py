"""What users do between steps: accumulation, several graphs alive at once, evaluation, clipping, other modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire.observe import counters
from tests.harness.jobs import in_turn, run_job
from tests.torch.graph import zoo
from tests.torch.graph.training import wrong_gradients

WORKERS = {"": 0, "model.layers.1": 1, "model.layers.2": 1}  # of the zoo's llama
Model = Callable[..., Any]


def loss(model: Model, step: int) -> torch.Tensor:
    return zoo.loss_of(model(**zoo.inputs("llama", step)))


def accumulate(model: Model) -> list[float]:
    """Three backward passes into the same gradients."""
    found = []
    for step in range(3):
        value = loss(model, step)
        value.backward()
        found.append(value.item())
    return found


def together(model: Model) -> list[float]:
    """Four forward passes are alive at once."""
    values = [loss(model, step) for step in range(4)]
    sum(values).backward()  # type: ignore[union-attr]
    return [value.item() for value in values]


def backwards(model: Model) -> list[float]:
    """The last forward pass goes back first."""
    values = [loss(model, step) for step in range(3)]
    for value in reversed(values):
        value.backward()
    return [value.item() for value in values]


def twice(model: Model) -> float:
    """One graph goes back twice."""
    value = loss(model, 5)
    value.backward(retain_graph=True)
    value.backward()
    return value.item()


def kept(model: Model) -> list[float]:
    """Losses with their graphs lie in a list, that is forgotten at the end."""
    return [value.item() for value in [loss(model, step) for step in range(6)]]


def evaluated(model: Any) -> list[float]:
    """Without gradients."""
    model.eval()
    with torch.no_grad():
        found = [loss(model, step).item() for step in range(3)]
    model.train()
    return found


USES = (accumulate, together, backwards, twice, kept, evaluated, accumulate, together)


def use(job: tw.Job, options: dict[str, Any]) -> dict[str, Any]:
    model = zoo.build("llama")
    alone = copy.deepcopy(model)
    compiled = torch.compile(model, backend="tensorwire", options={"workers": WORKERS, **options})
    wrong = []
    last: Any = None
    for round_ in range(2):
        for what in USES:
            before = counters.snapshot()
            if what(compiled) != what(alone):
                wrong.append(f"{what.__name__}: losses")
            last = counters.since(before)
            if round_ and (last.registrations or last.rpcs):
                wrong.append(f"{what.__name__}: {last}")
            wrong += [f"{what.__name__}: {path}" for path in wrong_gradients(model, alone)]
    return {"wrong": wrong, "copies": last.copies}


@pytest.mark.long
@pytest.mark.parametrize(("device", "mode"), [("shm", "zerocopy"), ("tcp", "zerocopy"), ("shm", "copy")])
def test_graphs_that_live_long(device: str, mode: str) -> None:
    results = run_job(use, {"mode": mode}, workers=2, servers=0, device=device).ok()
    assert [result["wrong"] for result in results] == [[], []]
    assert mode != "copy" or all(result["copies"] > 0 for result in results)


def clip(job: tw.Job) -> list[bool]:
    model = zoo.build("llama")
    alone = copy.deepcopy(model)
    compiled = torch.compile(model, backend="tensorwire", options={"workers": WORKERS})
    same = []
    for step in range(3):
        loss(compiled, step).backward()
        loss(alone, step).backward()
        before = counters.snapshot()
        norm = tw.torch.clip_grad_norm_(model.parameters(), 0.1)
        asked = counters.since(before).rpcs
        same.append(torch.equal(norm, torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)))
        same.append(step == 0 or asked == 0)
        same.append(wrong_gradients(model, alone) == [])
    return same


@pytest.mark.slow
def test_clipping_by_the_norm_of_all_gradients() -> None:
    for same in run_job(clip, workers=3, servers=0).ok():
        assert same == [True] * 9


def drop(job: tw.Job) -> None:
    """Dropout as in one process."""
    model = zoo.build("bert", dropout=0.1)
    alone = copy.deepcopy(model)
    options = {"workers": zoo.cut(model, 2, 1), "replay_random": True}
    compiled = torch.compile(model, backend="tensorwire", options=options)
    for step in range(3):
        for one in (compiled, alone):
            torch.manual_seed(step)
            zoo.loss_of(one(**zoo.inputs("bert", step))).backward()
        assert wrong_gradients(model, alone) == []


class Two(torch.nn.Module):
    """Logits that are too large for everybody."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 600)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def two() -> Two:
    """Nothing was compiled before."""
    torch.compiler.reset()
    torch.manual_seed(0)
    return Two()


def large(job: tw.Job) -> None:
    """With ``outputs="all"``, a large output is everywhere."""
    model = two()
    alone = copy.deepcopy(model)
    options = {"workers": {"body": 0, "head": 1}, "outputs": "all"}
    x = torch.randn(32, 64)
    logits = torch.compile(model, backend="tensorwire", options=options)(x)
    assert torch.equal(logits, alone(x))
    logits.square().mean().backward()
    alone(x).square().mean().backward()
    assert wrong_gradients(model, alone) == []


def peek(job: tw.Job) -> None:
    """Otherwise it is where it was made; who reads it elsewhere goes on after the error."""
    options = {"workers": {"body": 0, "head": 1}}
    logits = torch.compile(two(), backend="tensorwire", options=options)(torch.randn(32, 64))
    assert logits.shape == (32, 600)
    if job.rank == 1:
        assert logits.sum().isfinite()
        return
    with pytest.raises(tw.errors.NotOnThisWorker, match=r"is on worker 1.*'outputs': 'all'"):
        logits.sum()


def loss_outside(job: tw.Job) -> None:
    """The loss is a graph of its own, as in many models of transformers: it is computed where its input is."""
    model = two()
    alone = copy.deepcopy(model)
    compiled = torch.compile(model, backend="tensorwire", options={"workers": {"body": 0, "head": 1}})
    criterion = torch.compile(torch.nn.functional.cross_entropy, backend="tensorwire")
    x, y = torch.randn(32, 64), torch.randint(0, 600, (32,))
    mine, its = criterion(compiled(x), y), torch.nn.functional.cross_entropy(alone(x), y)
    mine.backward()
    its.backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    assert torch.equal(mine, its)
    assert [torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None] == [True, True]  # type: ignore[arg-type]


def sizes(job: tw.Job) -> None:
    """Batches of every size, below a bound that was said, are planned once."""
    model = two()
    alone = copy.deepcopy(model)
    options = {"workers": {"body": 0, "head": 1}, "outputs": "all"}
    compiled = torch.compile(model, backend="tensorwire", options=options)
    counted = []
    for size in (5, 31, 2, 17, 64, 3):
        x = torch.randn(size, 64)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
        before = counters.snapshot()
        compiled(x).sum().backward()
        counted.append(counters.since(before).rpcs)
        alone(x).sum().backward()
        assert wrong_gradients(model, alone) == []
    assert counted[1:] == [0] * 5


@pytest.mark.filterwarnings("ignore:.*is tied to")
def test_dropout_outputs_losses_and_sizes() -> None:
    run_job(in_turn, drop, large, peek, loss_outside, sizes, workers=2, servers=0).ok()
