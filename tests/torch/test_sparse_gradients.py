"""Embeddings with ``sparse=True`` under `StoreOptimizer`: rows travel, and the values are those of one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.observe import counters
from tensorwire.store import SSP, Async, Sync
from tests.harness.jobs import run_job

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


def train(job: tw.Job, name: str, options: dict[str, Any], mode: Any, steps: list[int], overlap: bool) -> Any:
    model = Bag(sparse=True)
    if job.rank:
        for p in model.parameters():
            p.data.fill_(7.0)  # worker 0's values win
    optimizer = tw.torch.StoreOptimizer(model, getattr(torch.optim, name), mode=mode, overlap=overlap, **options)
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


@pytest.mark.parametrize(
    ("name", "options", "device", "servers", "overlap"),
    [
        ("SGD", {"lr": 1}, "shm", 1, False),  # an int, which a schedule makes a fraction
        ("Adagrad", {"lr": 0.3, "lr_decay": 0.1}, "tcp", 2, False),
        ("Adagrad", {"lr": 0.3}, "shm", 2, True),
    ],
)
def test_values_are_those_of_one_process(
    name: str, options: dict[str, Any], device: str, servers: int, overlap: bool
) -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call] # or it warns
    steps = [4, 4]
    results = run_job(train, name, options, Sync(), steps, overlap, workers=2, servers=servers, device=device).ok()
    for (mine, state), (theirs, _) in itertools.pairwise(results):
        assert all(map(torch.equal, mine, theirs))
        assert set(state) == ({0, 1, 2, 3} if name == "Adagrad" else set())
    for sparse in (True, False):
        for mine, theirs in zip(results[0][0], stock(name, options, steps, sparse=sparse), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_workers_may_take_different_numbers_of_steps() -> None:
    options, steps = {"lr": 0.5}, [2, 5]
    results = run_job(train, "SGD", options, Sync(), steps, False, workers=2).ok()
    expected = stock("SGD", options, steps, sparse=True)
    for mine, _ in results:
        for found, theirs in zip(mine, expected, strict=True):
            torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", [Async(), SSP(staleness=1)])
def test_modes_in_which_each_gradient_is_applied_by_itself(mode: Any) -> None:
    ((mine, _),) = run_job(train, "Adagrad", {"lr": 0.3}, mode, [5], False, workers=1).ok()
    for found, theirs in zip(mine, stock("Adagrad", {"lr": 0.3}, [5], sparse=True), strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("mode", [Sync(), tw.store.DiLoCo(every=4)])
def test_sparse_adam_learns_and_sends_rows_alone(mode: Any) -> None:
    for losses, sent in run_job(adam, mode, workers=2, device="tcp").ok():
        assert losses[-1] < losses[0] / 2
        if isinstance(mode, Sync):
            assert 0 < sent < 20_000  # the tables have 144,000 bytes


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
