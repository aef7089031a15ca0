"""`StoreEmbedding`: a table on the servers trains as one in the worker's memory does."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import tensorwire as tw
from tensorwire import errors
from tensorwire.keyvalue.row_sums import RowSums
from tensorwire.store import Async, Sync
from tests.harness.jobs import for_each, in_turn, run_job
from tests.store.test_versions import reading

PIXELS, GRAYS, WIDTH = 64, 17, 8
loaded = functools.cache(load_digits)


def digits(rank: int, workers: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each pixel with its gray value is a word; a batch of images for one worker."""
    data = loaded()
    rows = torch.arange(rank, len(data.data), workers)[step * 50 : step * 50 + 50]
    words = torch.from_numpy(data.data).long()[rows] + GRAYS * torch.arange(PIXELS)
    return words, torch.from_numpy(data.target).long()[rows]


def head() -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(WIDTH, 10)


def losses(embedding: Any, first: int, last: int, rank: int, workers: int) -> list[float]:
    """The head does not learn, so that all workers have the same one."""
    layer, found = head().requires_grad_(False), []
    for step in range(first, last):
        words, targets = digits(rank, workers, step)
        loss = torch.nn.functional.cross_entropy(layer(embedding(words).sum(1)), targets)
        found.append(float(loss.detach()))
        loss.backward()
        embedding.step()
    return found


def train(job: tw.Job, name: str, options: dict[str, Any], mode: Sync | Async, folder: str | None) -> Any:
    embedding = tw.torch.StoreEmbedding(
        PIXELS * GRAYS, WIDTH, getattr(torch.optim, name), mode=mode, scale=0.1, seed=5, **options
    )
    assert [p.numel() for p in embedding.parameters()] == [1]  # the anchor
    with torch.no_grad():
        before = embedding(torch.arange(PIXELS * GRAYS))
    first = losses(embedding, 0, 5, job.rank, job.num_workers)
    embedding.wait()
    job.barrier()
    if folder is not None and job.rank == 0:
        embedding.save(folder)
    job.barrier()
    second = losses(embedding, 5, 8, job.rank, job.num_workers)
    embedding.wait()
    job.barrier()
    with torch.no_grad():
        return before, embedding(torch.arange(PIXELS * GRAYS)), first + second


def go_on(job: tw.Job, name: str, options: dict[str, Any], folder: str) -> Any:
    embedding = tw.torch.StoreEmbedding(
        PIXELS * GRAYS, WIDTH, getattr(torch.optim, name), initial="zeros", seed=0, **options
    )
    with pytest.raises(errors.ArgumentError, match="cannot read"):
        embedding.load(folder + "-missing")
    embedding.load(folder)
    losses(embedding, 5, 8, job.rank, job.num_workers)
    with torch.no_grad():
        return embedding(torch.arange(PIXELS * GRAYS))


def stock(name: str, options: dict[str, Any], before: torch.Tensor, workers: int, *, sparse: bool) -> Any:
    """All workers' batches in one process: the mean of their losses is what is minimized."""
    embedding = torch.nn.Embedding.from_pretrained(before.clone(), freeze=False, sparse=sparse)
    optimizer = getattr(torch.optim, name)(embedding.parameters(), **options)
    layer, found = head().requires_grad_(False), []
    for step in range(8):
        for rank in range(workers):
            words, targets = digits(rank, workers, step)
            loss = torch.nn.functional.cross_entropy(layer(embedding(words).sum(1)), targets)
            found.append(float(loss.detach()))
            (loss / workers).backward()
        optimizer.step()
        optimizer.zero_grad()
    return embedding.weight.detach(), found


OPTIMIZERS = [("SGD", {"lr": 0.5}), ("Adagrad", {"lr": 0.1}), ("SparseAdam", {"lr": 0.01, "betas": (0.8, 0.99)})]


def test_it_trains_as_a_table_in_memory_and_goes_on_from_a_folder(tmp_path: Path) -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call] # or it warns
    folders = {name: str(tmp_path / name) for name, _ in OPTIMIZERS}
    cases = [(name, options, Sync(), folders[name]) for name, options in OPTIMIZERS]
    results = run_job(for_each, train, cases, workers=2, servers=2).ok()
    again = [(name, options, folders[name]) for name, options in OPTIMIZERS]
    going_on = run_job(for_each, go_on, again, workers=2, servers=1).ok()
    for at, (name, options) in enumerate(OPTIMIZERS):
        (before, after, first), (_, other, _) = results[0][at], results[1][at]
        assert torch.equal(other, after)
        expected, one = stock(name, options, before, 2, sparse=True)
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.tensor(first), torch.tensor(one[::2]), rtol=1e-5, atol=1e-6)
        if name != "SparseAdam":
            torch.testing.assert_close(after, stock(name, options, before, 2, sparse=False)[0], rtol=1e-4, atol=1e-6)
        assert all(torch.equal(found[at], after) for found in going_on)


def test_each_workers_gradients_are_applied_by_themselves() -> None:
    options = {"lr": 0.5}
    ((before, after, _),) = run_job(train, "SGD", options, Async(), None, workers=1, device="tcp").ok()
    torch.testing.assert_close(after, stock("SGD", options, before, 1, sparse=True)[0], rtol=1e-5, atol=1e-6)


ROWS, TARGET = 20, torch.ones(4)


def backward(embedding: Any, how: str, step: int, rank: int, share: float = 1.0) -> None:
    """What one worker does before its optimizer's step; ``share``: what its loss counts."""

    def square(part: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * rank + part)
        rows = embedding(torch.randint(0, ROWS, (6,), generator=generator))
        return share * (rows - TARGET * (part + 1)).square().sum()

    if how == "two lookups":
        (square(0) * square(1)).backward()
    elif how == "accumulation":
        square(0).backward()
        square(1).backward()
    else:
        loss = square(0)
        loss.backward(retain_graph=True)
        (2 * loss).backward()


WAYS = ["two lookups", "accumulation", "kept graph"]


def in_many_ways(job: tw.Job, name: str, options: dict[str, Any]) -> list[Any]:
    found = []
    for how in WAYS:
        embedding = tw.torch.StoreEmbedding(ROWS, 4, getattr(torch.optim, name), seed=3, **options)
        dense = torch.nn.Linear(4, 1)
        store = tw.torch.StoreOptimizer(dense, torch.optim.SGD, lr=0.1)
        with torch.no_grad():
            first = embedding(torch.arange(ROWS))
        for step in range(4):
            if step == 0:
                backward(embedding, how, step, job.rank)
                store.step()
            elif step == 1:  # as Lightning does
                store.step(partial(backward, embedding, how, step, job.rank))
            elif step == 2:  # also where a step was left out before
                backward(embedding, how, 77, job.rank)
                embedding.zero_grad()
                backward(embedding, how, step, job.rank)
                torch.optim.SGD(dense.parameters(), lr=0.0).step()
            else:
                backward(embedding, how, step, job.rank)
                embedding.step()
                store.step()
        with torch.no_grad():
            found.append((first, embedding(torch.arange(ROWS))))
    return found


def test_gradients_are_summed_until_a_step() -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call] # or it warns
    cases = [("SGD", {"lr": 0.0001}), *OPTIMIZERS[1:]]
    (found, _) = run_job(for_each, in_many_ways, cases).ok()
    for (name, options), ways in zip(cases, found, strict=True):
        for how, (first, last) in zip(WAYS, ways, strict=True):
            stock = torch.nn.Embedding.from_pretrained(first.clone(), freeze=False, sparse=True)
            optimizer = getattr(torch.optim, name)(stock.parameters(), **options)
            for step in range(4):
                optimizer.zero_grad()
                for rank in range(2):
                    share = 0.5**0.5 if how == "two lookups" else 0.5  # of a product
                    backward(stock, how, step, rank, share)
                optimizer.step()
            torch.testing.assert_close(last, stock.weight.detach(), rtol=1e-4, atol=1e-5, msg=f"{name}, {how}")


def not_right(job: tw.Job) -> None:
    embedding = tw.torch.StoreEmbedding(ROWS, 4, torch.optim.SGD, lr=1.0, initial="zeros")
    dense = torch.nn.Linear(4, 1)
    store = tw.torch.StoreOptimizer(dense, torch.optim.SGD, lr=0.1)
    for optimizer in (store, torch.optim.SGD(dense.parameters(), lr=0.1)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(embedding(torch.arange(3)).sum() + dense(torch.ones(4)).sum()).backward()
        with pytest.raises(errors.Unsupported, match=r"StoreEmbedding\(20, 4.*GradScaler"):
            scaler.step(optimizer)
        embedding.zero_grad()
        dense.zero_grad()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(embedding(torch.arange(3)).sum() + dense(torch.ones(4)).sum()).backward()
    off.step(store)
    store.max_grad_norm = 1.0
    with torch.no_grad():
        assert torch.equal(embedding(torch.arange(3)), torch.full((3, 4), -1.0))
    embedding(torch.arange(3)).sum().backward()
    with pytest.raises(errors.Unsupported, match="no max_grad_norm"):
        store.step()
    embedding.zero_grad()


def clip(model: torch.nn.Module, how: str) -> None:
    if how == "norm":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif how == "norm, one by one":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, foreach=False)  # nothing is above it in this batch
    elif how == "value":
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    else:
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad / 2


def clipped(job: tw.Job) -> None:
    """With an optimizer of torch's and one of the store's, in front of its step and in its closure, and without one."""
    model = torch.nn.ModuleDict({"rows": tw.torch.StoreEmbedding(ROWS, 4, torch.optim.SGD, lr=1.0, initial="zeros")})
    rows: Any = model["rows"]
    model["dense"] = torch.nn.Linear(4, 1)
    assert list(model.state_dict()) == ["dense.weight", "dense.bias"]
    model.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    stores = [tw.torch.StoreOptimizer(model, torch.optim.SGD, lr=0.1)]
    refused = r"clipped or scaled after backward\(\), and those of StoreEmbedding\(20, 4"

    def backward(how: str | None) -> None:
        (rows(torch.arange(3)).sum() + model["dense"](torch.ones(4)).sum()).backward()
        if how is not None:
            clip(model, how)

    pushed = 0
    for how in ("norm", "norm, one by one", "value", "by hand"):
        for step in (stores[0].step, plain.step, rows.step):
            for put in (False, True)[: 1 + (step != rows.step)]:
                values = [p.detach().clone() for p in model.parameters()]
                closure = functools.partial(backward, how)
                with pytest.raises(errors.Unsupported, match=refused):
                    step(closure) if put else (closure(), step())
                if not put:  # a closure's gradients are in the parameters before anybody can look at them
                    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
                model.zero_grad()
                rows.zero_grad()
                if step == plain.step:
                    stores[0].write_parameters()
        for step in (stores[0].step, rows.step):
            backward(None)
            backward(None)
            torch.nn.utils.clip_grad_norm_(model["dense"].parameters(), 1e-3)
            step()
            pushed += 2
            model.zero_grad(set_to_none=False)
    clip(model, "norm")  # nothing waits
    rows.step()
    with torch.no_grad():
        assert torch.equal(rows(torch.arange(3)), torch.full((3, 4), -float(pushed)))
    assert float(rows.anchor) == 0


def test_gradients_that_no_step_pushes_are_told_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[Any] = []
    worker = SimpleNamespace(at_close=lambda call, owner: calls.append(call))
    sums = RowSums(cast(Any, worker), cast(Any, None), "the table")
    calls[0]()
    assert capsys.readouterr().err == ""
    sums.add(np.arange(2), np.ones((2, 4)))
    calls[0]()
    assert "gradients of the table from 1 backward passes were not pushed" in capsys.readouterr().err
    assert not sums.waiting


def misuse(job: tw.Job) -> None:
    make, adam = tw.torch.StoreEmbedding, torch.optim.Adam
    for text, call in [
        ("torch.optim.SGD, torch.optim.SparseAdam; not by", lambda: make(3, 2, adam)),
        ("num_embeddings must be", lambda: make(0, 2, torch.optim.SGD, lr=1)),
        ("changes all rows", lambda: make(3, 2, torch.optim.SGD, lr=1, momentum=0.5)),
        ("seed must be", lambda: make(3, 2, torch.optim.SGD, lr=1, seed=-1)),
        ("seed must be", lambda: make(3, 2, torch.optim.SGD, lr=1, seed=2**63)),
        ("initial must be", lambda: make(3, 2, torch.optim.SGD, lr=1, initial="ones")),
    ]:
        with pytest.raises(errors.ArgumentError, match=text):
            call()
    with pytest.raises(errors.Unsupported, match=r"float64, not torch.bfloat16"):
        make(3, 2, torch.optim.SGD, lr=1, dtype=torch.bfloat16)
    embedding = make(3, 2, torch.optim.SGD, lr=1.0)
    with pytest.raises(errors.ArgumentError, match="no row 3"):
        embedding(torch.tensor([3]))
    with pytest.raises(errors.ArgumentError, match="no numeric option"):
        embedding.set_options(speed=3)


def test_what_would_be_wrong_is_refused() -> None:
    run_job(in_turn, not_right, clipped, misuse, workers=1).ok()


# ---- versions for readers


def published(job: tw.Job, mode: Sync | Async) -> list[bool]:
    embedding = tw.torch.StoreEmbedding(ROWS, WIDTH, torch.optim.Adagrad, mode=mode, lr=0.1, publish=True)
    same = []
    for step in range(3):
        embedding(torch.tensor([[step, 7], [job.rank, ROWS - 1]])).sum().backward()
        embedding.step()
        counter = embedding.publish(step=step)
        if job.rank == 0:
            with reading(job) as reader:
                version, found = reader.pull(counter, rows={"embedding": [7, ROWS - 1, step]})
                with torch.no_grad():
                    wanted = embedding(torch.tensor([7, ROWS - 1, step]))
                same += [torch.equal(found["embedding"], wanted), version.step == step, len(embedding.readers()) == 1]
        job.barrier()
    with pytest.raises(errors.ArgumentError, match="construct it with publish=True"):
        tw.torch.StoreEmbedding(ROWS, WIDTH, torch.optim.SGD, lr=0.1).publish()
    with pytest.raises(errors.ArgumentError, match="no steps to count"):
        tw.torch.StoreEmbedding(ROWS, WIDTH, torch.optim.SGD, lr=0.1, publish=tw.store.Every(3))
    return same


@pytest.mark.parametrize("mode", [Sync(), Async()], ids=repr)
def test_readers_get_the_rows_that_a_lookup_finds(mode: Sync | Async) -> None:
    workers = 2 if isinstance(mode, Sync) else 1
    first, *_ = run_job(published, mode, workers=workers, servers=2).ok()
    assert first == [True] * 9
