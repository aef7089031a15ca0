"""Placed models in jobs: when they are placed, hooks on their gradients, and layouts that are refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import tensorwire as tw
from tests.harness.jobs import in_turn, run_job
from tests.levels import mostly_long

WORKERS = {"": 0, "0": 1}
OF_NOBODY = {"": 0, "1": 1}  # worker 1 has no parameter


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))


def late(job: tw.Job) -> list[Any]:
    """Places models that ran compiled, each by itself, before."""
    found: list[Any] = []
    x = torch.ones(4, 8)
    for workers in (WORKERS, OF_NOBODY):
        torch.compiler.reset()
        mine = model()
        alone = copy.deepcopy(mine)
        compiled = torch.compile(mine, backend="tensorwire")
        right = alone(x)
        right.sum().backward()
        found.append(torch.equal(compiled(x), right))
        tw.torch.place(mine, workers)
        for _ in range(2):
            result = compiled(x)
            result.sum().backward()
            found.append(torch.equal(result, right))
            pairs = zip(mine.parameters(), alone.parameters(), strict=True)
            grads = [torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None]  # type: ignore[arg-type]
            found.append((all(grads), len(grads)))
            mine.zero_grad()
    return found


def placed_twice(job: tw.Job) -> None:
    """Places a model that has its workers from the options; and runs what another model was compiled for."""
    mine = model()
    torch.compile(mine, backend="tensorwire", options={"workers": WORKERS})(torch.ones(4, 8))
    with pytest.raises(
        tw.errors.ArgumentError, match=r"^this model already has its workers, from place\(\) or from the"
    ):
        tw.torch.place(mine, WORKERS)


def reading(job: tw.Job) -> None:
    """What each way to place a model leaves to read here: names, and what reading the others raises."""
    for how in ("place", "options"):
        torch._dynamo.reset()
        mine, alone, x = model(), model(), torch.ones(4, 8)
        options = {"workers": WORKERS} if how == "options" else {}
        if how == "place":
            tw.torch.place(mine, WORKERS)
        compiled = torch.compile(mine, backend="tensorwire", options=options)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, weight_decay=0.1) for each in (mine, alone)]
        for _ in range(3):
            for each in (compiled, alone):
                each(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        right, said, found = alone.state_dict(), set[str](), []
        for name, value in mine.state_dict().items():
            try:
                found.append((name, torch.equal(value, right[name])))
            except tw.errors.NotOnThisWorker as error:
                said.add(str(error).partition(" is on ")[2].partition(":")[0])
        for read in (
            lambda mine=mine: sum(p.square().sum() for p in mine.parameters()),
            lambda mine=mine: torch.save(mine.state_dict(), io.BytesIO()),
            lambda mine=mine: copy.deepcopy(mine),
        ):
            with pytest.raises(tw.errors.NotOnThisWorker):
                read()
        tw.torch.unplace(mine, right)
        assert found == [(f"{2 - 2 * job.rank}.{what}", True) for what in ("weight", "bias")], how
        assert said == {f"worker {1 - job.rank}"}
        assert torch.equal(mine(x), alone(x))


def renormed(job: tw.Job) -> list[str]:
    """Embeddings that change their weight in forward, of weights that reach every worker or stay where they are."""
    wrong = []
    for rows, place in ((9, True), (9, False), (20_000, True), (20_000, False)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        mine = nn.Sequential(nn.Embedding(rows, 6, max_norm=0.7), nn.Linear(6, 3))
        alone, workers = copy.deepcopy(mine), {"": 0, "1": 1}
        if place:
            tw.torch.place(mine, workers)
        compiled = torch.compile(mine, backend="tensorwire", options={} if place else {"workers": workers})
        for step in range(3):
            ids, losses = torch.arange(step, step + 4), []
            for each in (compiled, alone):
                losses.append(each(ids).square().mean())
                losses[-1].backward()
            wrong += [f"{rows}, {place}, {step}: loss"] * (not torch.equal(*losses))
            for (name, p), its in zip(mine.named_parameters(), alone.named_parameters(), strict=True):
                if name.startswith(str(job.rank)) and not (torch.equal(p, its[1]) and torch.equal(p.grad, its[1].grad)):  # type: ignore[arg-type]
                    wrong.append(f"{rows}, {place}, {step}: {name}")
            mine.zero_grad()
            alone.zero_grad()
    return wrong


def hooked(job: tw.Job) -> None:
    """Hooks on gradients are called where the parameter lives."""
    for how in ("before place", "after place", "options"):
        mine, calls = model(), list[str]()
        torch._dynamo.reset()

        def register(mine: nn.Module = mine, calls: list[str] = calls) -> None:
            def double(gradient: torch.Tensor) -> torch.Tensor:
                calls.append("gradient")
                return gradient * 2

            for parameter in mine.parameters():
                parameter.register_hook(double)
                parameter.register_post_accumulate_grad_hook(lambda p: calls.append(f"{p.grad.dim()} dimensions"))

        if how == "before place":
            register()
        if how != "options":
            tw.torch.place(mine, WORKERS)
        if how != "before place":
            register()
        options = {"workers": WORKERS} if how == "options" else {}
        torch.compile(mine, backend="tensorwire", options=options)(torch.ones(4, 8)).sum().backward()
        alone = model()
        alone(torch.ones(4, 8)).sum().backward()
        pairs = zip(mine.parameters(), alone.parameters(), strict=True)
        doubled = [torch.equal(a.grad, 2 * b.grad) for a, b in pairs if a.grad is not None]  # type: ignore[operator]
        assert doubled == [True, True], how
        assert sorted(calls) == ["1 dimensions", "2 dimensions", "gradient", "gradient"], how


def test_placed_models_in_a_job() -> None:
    programs = in_turn, placed_twice, reading, hooked, late, renormed
    for rank, (*_, (first, *found), wrong) in enumerate(run_job(*programs, workers=2, servers=0).ok()):
        assert first
        assert found == [*[True, (True, 2)] * 2, True, *[True, (True, (4, 0)[rank])] * 2]
        assert wrong == []


def nested(job: tw.Job) -> None:
    mine = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    tw.torch.place(mine, {"": 0, "0": 1})
    given = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    torch.compile(mine, backend="tensorwire")(given)


def test_a_result_that_is_a_nested_tensor_is_refused() -> None:
    ended = run_job(nested, workers=2, servers=0)
    said = "Unsupported: the model returns a NestedTensor, and a model that is cut over workers returns strided tensors"
    assert any(said in error for error in ended.errors)


def sparse(job: tw.Job, kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    mine = nn.Sequential(kind(10, 8, sparse=True), nn.Linear(8, 4))
    tw.torch.place(mine, {"": 0, "1": 1})
    torch.compile(mine, backend="tensorwire")(torch.zeros(4, 8, dtype=torch.int64)).sum().backward()


@pytest.mark.parametrize("kind", mostly_long([nn.Embedding, nn.EmbeddingBag], [nn.Embedding]))
def test_sparse_gradients_are_refused_by_the_name_of_the_module(kind: type[nn.Module]) -> None:
    ended = run_job(sparse, kind, workers=2, servers=0)
    said = f"Unsupported: 0 ({kind.__name__}) makes a sparse gradient, which is not supported"
    assert any(said in error for error in ended.errors)
    assert ended.cause is not None
