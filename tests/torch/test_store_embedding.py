"""`StoreEmbedding`: a table on the servers trains as one in the worker's memory does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

import tensorwire as tw
from tensorwire import errors
from tensorwire.store import Async, Sync
from tests.harness.jobs import run_job

PIXELS, GRAYS, WIDTH = 64, 17, 8


def digits(rank: int, workers: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each pixel with its gray value is a word; a batch of images for one worker."""
    data = load_digits()
    rows = torch.arange(rank, len(data.data), workers)[step * 50 : step * 50 + 50]
    words = torch.from_numpy(data.data).long()[rows] + GRAYS * torch.arange(PIXELS)
    return words, torch.from_numpy(data.target).long()[rows]


def head() -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(WIDTH, 10)


def losses(embedding: Any, first: int, last: int, rank: int, workers: int, after: Any) -> list[float]:
    """The head does not learn, so that all workers have the same one."""
    layer, found = head().requires_grad_(False), []
    for step in range(first, last):
        words, targets = digits(rank, workers, step)
        loss = torch.nn.functional.cross_entropy(layer(embedding(words).sum(1)), targets)
        found.append(float(loss.detach()))
        loss.backward()
        after()
    return found


def train(job: tw.Job, name: str, options: dict[str, Any], mode: Sync | Async, folder: str | None) -> Any:
    embedding = tw.torch.StoreEmbedding(
        PIXELS * GRAYS, WIDTH, getattr(torch.optim, name), mode=mode, scale=0.1, seed=5, **options
    )
    assert not list(embedding.parameters())
    with torch.no_grad():
        before = embedding(torch.arange(PIXELS * GRAYS))
    first = losses(embedding, 0, 5, job.rank, job.num_workers, lambda: None)
    embedding.wait()
    job.barrier()
    if folder is not None and job.rank == 0:
        embedding.save(folder)
    job.barrier()
    second = losses(embedding, 5, 8, job.rank, job.num_workers, lambda: None)
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
    losses(embedding, 5, 8, job.rank, job.num_workers, lambda: None)
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


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_it_trains_as_a_table_in_memory_and_goes_on_from_a_folder(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call] # or it warns
    folder = str(tmp_path / "table")
    results = run_job(train, name, options, Sync(), folder, workers=2, servers=2).ok()
    before, after, _ = results[0]
    assert torch.equal(results[1][1], after)
    expected, one = stock(name, options, before, 2, sparse=True)
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(results[0][2]), torch.tensor(one[::2]), rtol=1e-5, atol=1e-6)
    if name != "SparseAdam":
        torch.testing.assert_close(after, stock(name, options, before, 2, sparse=False)[0], rtol=1e-4, atol=1e-6)
    for found in run_job(go_on, name, options, folder, workers=2, servers=1).ok():
        assert torch.equal(found, after)


def test_each_workers_gradients_are_applied_by_themselves() -> None:
    options = {"lr": 0.5}
    ((before, after, _),) = run_job(train, "SGD", options, Async(), None, workers=1, device="tcp").ok()
    torch.testing.assert_close(after, stock("SGD", options, before, 1, sparse=True)[0], rtol=1e-5, atol=1e-6)


def misuse(job: tw.Job) -> None:
    make, adam = tw.torch.StoreEmbedding, torch.optim.Adam
    for text, call in [
        ("torch.optim.SGD, torch.optim.SparseAdam; not by", lambda: make(3, 2, adam)),
        ("num_embeddings must be", lambda: make(0, 2, torch.optim.SGD, lr=1)),
        ("changes all rows", lambda: make(3, 2, torch.optim.SGD, lr=1, momentum=0.5)),
        ("initial must be", lambda: make(3, 2, torch.optim.SGD, lr=1, initial="ones")),
    ]:
        with pytest.raises(errors.ArgumentError, match=text):
            call()
    embedding = make(3, 2, torch.optim.SGD, lr=1.0)
    with pytest.raises(errors.ArgumentError, match="no row 3"):
        embedding(torch.tensor([3]))
    with pytest.raises(errors.ArgumentError, match="no numeric option"):
        embedding.set_options(speed=3)


def test_wrong_arguments_are_refused() -> None:
    run_job(misuse, workers=1).ok()
