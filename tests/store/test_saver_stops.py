"""A worker that saves slowly, or not at all, keeps nobody's pushes waiting; and what it saves belongs together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import tensorwire as tw
from tensorwire.store import state_transfer
from tensorwire.store.client_state import StateClient, fetch_state
from tensorwire.store.modes import Async
from tests.harness.jobs import run_job

BUCKETS, ELEMENTS, PUSHES = 24, 4096, 3


def small_parts() -> None:
    """So that a little state takes many parts."""
    state_transfer.PART_BYTES = 64 << 10


def optimizer() -> tuple[StateClient, Callable[[], None]]:
    params = [(f"p{i}", torch.nn.Parameter(torch.zeros(ELEMENTS))) for i in range(BUCKETS)]
    made = tw.torch.StoreOptimizer(params, torch.optim.Adam, lr=1.0, mode=Async(), bucket_bytes=4 * ELEMENTS)

    def step() -> None:
        for _, p in params:
            p.grad = torch.ones(ELEMENTS)
        made.step()

    return made._parts[0].client, step


def keys() -> tuple[StateClient, Callable[[], None]]:
    kv = tw.store.KeyValue(Async(), "Adam", lr=1.0)
    names = [f"k{i}" for i in range(BUCKETS)]
    kv.init(names, [np.zeros(ELEMENTS, np.float32)] * BUCKETS)
    return kv._stores[0], lambda: kv.pushpull(names, [np.ones(ELEMENTS, np.float32)] * BUCKETS).wait()


def rows() -> tuple[StateClient, Callable[[], None]]:
    kv = tw.store.KeyValue(Async(), "SparseAdam", lr=1.0)
    count = BUCKETS * 1024
    kv.init_rows("t", (count, 4))
    return kv._tables["t"].client, lambda: kv.row_sparse_push(
        "t", np.arange(count), np.ones((count, 4), np.float32)
    ).wait()


def updates_seen(client: StateClient, push: Callable[[], None], job: Any) -> list[tuple[set[int], set[int]]]:
    """By place in the state of all buckets: after how many updates its moments were copied, of each kind."""
    if job.rank == 0:
        push()
    job.barrier()
    seen: dict[tuple[int, int], dict[str, set[int]]] = {}
    if job.rank == 1:
        items = fetch_state(client)
        for n, (entry, data) in enumerate(items):
            if n == 1:
                job.barrier()  # from here the other one pushes, and this one takes nothing,
                job.barrier()  # until that is done
            if entry.rows:
                found = np.unique(np.frombuffer(data, entry.dtype))
                decay = 0.9 if entry.key == "exp_avg" else 0.999
                counts = {round(float(np.log1p(-np.float64(v)) / np.log(decay))) for v in found}
                for block in range(entry.start // ELEMENTS, -(-entry.stop // ELEMENTS)):
                    seen.setdefault((entry.tensor, block), {}).setdefault(entry.key, set()).update(counts)
    else:
        job.barrier()
        for _ in range(PUSHES):
            push()
        job.barrier()
    return [(kinds["exp_avg"], kinds["exp_avg_sq"]) for kinds in seen.values()]


def save_slowly(job: Any) -> list[Any]:
    small_parts()
    return [updates_seen(*make(), job) for make in (optimizer, keys, rows)]


def test_pushes_go_on_while_a_saver_takes_nothing() -> None:
    _, found = run_job(save_slowly, prepare=small_parts).ok()
    for seen in found:
        assert len(seen) == BUCKETS
        assert all(first == second and len(first) == 1 for first, second in seen), seen
        assert {min(first) for first, _ in seen} == {1, 1 + PUSHES}, seen
