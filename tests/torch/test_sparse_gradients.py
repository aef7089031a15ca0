"""Embeddings with ``sparse=True`` under `StoreOptimizer`: rows travel, and the values are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.observe import counters
from tensorwire.store import Async, Sync
from tests.harness.jobs import for_each, run_job

WORDS, WIDTH = 3000, 8


class Bag(torch.nn.Module):
    """Two embeddings, one of which has bags, under a layer."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = torch.nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.bags = torch.nn.EmbeddingBag(WORDS // 2, WIDTH, mode="sum", sparse=sparse)
        self.top = torch.nn.Linear(2 * WIDTH, 4)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.top(torch.cat([self.words(indices).sum(1), self.bags(indices // 2)], 1))
        return found


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    indices = torch.randint(0, WORDS, (5, 6), generator=generator)
    return torch.nn.functional.cross_entropy(model(indices), indices.sum(1) % 4)


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train(job: tw.Job, name: str, options: dict[str, Any], steps: list[int], overlap: bool) -> Any:
    model = Bag(sparse=True)
    if job.rank:
        for p in model.parameters():
            p.data.fill_(7.0)  # worker 0's values win
    optimizer = tw.torch.StoreOptimizer(model, getattr(torch.optim, name), overlap=overlap, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    with job.uneven():
        for step in range(steps[job.rank]):
            if step:
                schedule.step()
            optimizer.zero_grad()
            loss_of(model, job.rank, step).backward()
            optimizer.step()
    optimizer.wait()
    state = optimizer.state_dict()
    if steps[0] == 4:  # a resumed one goes on with the same bits
        optimizer.load_state_dict(state)
        model.load_state_dict(dict(model.state_dict()))
        optimizer.zero_grad()
        loss_of(model, job.rank, 4).backward()
        optimizer.step()
        optimizer.wait()
    return values(model), state["state"]


def stock(name: str, options: dict[str, Any], steps: list[int], *, sparse: bool) -> list[torch.Tensor]:
    model = Bag(sparse=sparse)
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    last = 5 if steps[0] == 4 else max(steps)
    for step in range(last):
        if step < max(steps):
            optimizer.param_groups[0]["lr"] = options["lr"] / (1 + step)
        optimizer.zero_grad()
        for rank, mine in enumerate(steps):
            if step < mine or step >= max(steps):
                (loss_of(model, rank, step) / len(steps)).backward()
        optimizer.step()
    return values(model)


CASES: list[tuple[str, dict[str, Any], list[int], bool]] = [
    ("SGD", {"lr": 1}, [4, 4], False),  # an int, which a schedule makes a fraction
    ("Adagrad", {"lr": 0.3, "lr_decay": 0.1}, [4, 4], False),
    ("Adagrad", {"lr": 0.3}, [4, 4], True),
    ("SGD", {"lr": 0.5}, [2, 5], False),
]


def test_values_are_those_of_one_process() -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call] # or it warns
    first, second = run_job(for_each, train, CASES, workers=2, servers=2, device="tcp").ok()
    for (name, options, steps, _), (mine, state), (theirs, _) in zip(CASES, first, second, strict=True):
        assert all(map(torch.equal, mine, theirs))
        assert set(state) == ({0, 1, 2, 3} if name == "Adagrad" else set())
        for sparse in (True, False):
            torch.testing.assert_close(mine, stock(name, options, steps, sparse=sparse), rtol=1e-5, atol=1e-6)


def adam(job: tw.Job, mode: Any) -> Any:
    """SparseAdam for the rows, and another optimizer for the rest; and what a step sends."""
    model = Bag(sparse=True)
    rows = [(n, p) for n, p in model.named_parameters() if "top" not in n]
    first = tw.torch.StoreOptimizer(rows, torch.optim.SparseAdam, lr=0.01, mode=mode)
    rest = tw.torch.StoreOptimizer(model.top.named_parameters(), torch.optim.Adam, lr=0.01, mode=mode)
    losses = []
    for step in range(10):
        before = counters.snapshot()
        loss = loss_of(model, job.rank, 0)
        losses.append(float(loss.detach()))
        loss.backward()
        first.step()
        rest.step()
        first.zero_grad()
        rest.zero_grad()
        sent = counters.since(before)
        assert sent.rpcs == sent.registrations == 0 or step == 0
    return losses, sent.bytes


def test_sparse_adam_learns_and_sends_rows_alone() -> None:
    for found in run_job(for_each, adam, [(Sync(),), (tw.store.DiLoCo(every=4),)], workers=2, device="tcp").ok():
        assert all(losses[-1] < losses[0] / 2 for losses, _ in found)
        assert 0 < found[0][1] < 20_000  # the tables have 144,000 bytes


def misuse(job: tw.Job) -> None:
    def refused(text: str, call: Any) -> None:
        with pytest.raises(errors.Unsupported, match=text):
            call()

    make = tw.torch.StoreOptimizer
    model = Bag(sparse=True)
    refused("which AdamW does not take", lambda: make(model, torch.optim.AdamW))
    refused("SparseAdam is for sparse gradients", lambda: make(model.top, torch.optim.SparseAdam))
    refused("use no max_grad_norm", lambda: make(model, torch.optim.SGD, lr=1, max_grad_norm=1.0))
    for mode in (Async(damping=1), Async(max_staleness=3)):
        with pytest.raises(errors.ArgumentError, match="do not support damping or max_staleness"):
            make(model, torch.optim.SGD, lr=1, mode=mode)
    with pytest.raises(errors.ArgumentError, match="changes all rows in every step"):
        make(model, torch.optim.SGD, lr=1, momentum=0.9)
    optimizer = make(model, torch.optim.SGD, lr=1.0)
    model.words.weight.grad = torch.ones(WORDS, WIDTH)
    refused("has a dense gradient", optimizer.step)
    model.words.weight.grad = None
    with torch.no_grad():
        model.words.weight.add_(1)
    with pytest.raises(errors.ParameterModified):
        optimizer.step()
    optimizer.write_parameters()
    before = values(model)
    optimizer.step()
    assert all(map(torch.equal, before, values(model)))


def test_what_does_not_go_with_sparse_gradients_is_refused() -> None:
    run_job(misuse, workers=1).ok()
