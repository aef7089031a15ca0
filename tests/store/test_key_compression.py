"""`KeyValue` with coded pushes: what pulls return is what the codes say, and what they leave out comes later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.observe import counters
from tensorwire.store import Async, KeyValue, Sync
from tests.harness.jobs import run_job
from tests.store.coded import SimulatedCode

Array = np.ndarray[Any, Any]
CODES = ["fp16", "bf16", "2bit(0.5)", "topk(0.1)", "int8(100)"]
BUCKET = 4096
VALUES: dict[str, Array] = {
    "wide": np.linspace(-1, 1, 2500, dtype="f4").reshape(50, 50),  # cut into three buckets
    "half": np.linspace(-1, 1, 200, dtype="f2"),
    "number": np.array(3.0, "f4"),  # a code of which would be larger
    "none": np.zeros((0, 3), "f4"),
    "counts": np.arange(70, dtype="i8"),
}
KEYS = list(VALUES)


def pushed(rank: int, step: int) -> list[Array]:
    rng = np.random.default_rng([rank, step])
    return [np.asarray(rng.standard_normal(v.shape) * 3, v.dtype) for v in VALUES.values()]


def seen_by_servers(name: str, rank: int, steps: int) -> list[list[Array]]:
    """A worker's pushes, as their codes say."""
    rows = [[value.reshape(-1)[at : at + 1024] for at in range(0, value.size, 1024)] for value in VALUES.values()]
    codes = [[SimulatedCode(name, Sync(), [torch.from_numpy(part.copy())]) for part in parts] for parts in rows]
    found = []
    for step in range(steps):
        arrays = []
        for value, parts, mine in zip(pushed(rank, step), rows, codes, strict=True):
            flat = value.reshape(-1).copy()
            for number, (part, code) in enumerate(zip(parts, mine, strict=True)):
                if code.smaller:
                    there = slice(1024 * number, 1024 * number + part.size)
                    (seen,) = code.push([torch.from_numpy(flat[there])], [])
                    assert seen is not None
                    flat[there] = seen.numpy()
            arrays.append(flat.reshape(value.shape))
        found.append(arrays)
    return found


def add(job: tw.Job, name: str, mode: Sync | Async) -> tuple[list[list[Array]], int]:
    kv = KeyValue(mode, "sum", bucket_bytes=BUCKET, compression=name)
    kv.init(KEYS, list(VALUES.values()))
    seen, before = [], counters.snapshot()
    for step in range(4):
        arrays = pushed(job.rank, step)
        slot = kv.slot("wide")
        slot[:] = arrays[0]
        arrays[0] = slot
        seen.append(kv.pushpull(KEYS, arrays).wait())
    return seen, counters.since(before).bytes // 4


@pytest.mark.parametrize(("name", "mode"), [*((name, Sync()) for name in CODES), ("topk(0.1)", Async())])
def test_a_pull_returns_what_the_codes_add_up_to(name: str, mode: Sync | Async) -> None:
    workers = 2 if isinstance(mode, Sync) else 1
    results = run_job(add, name, mode, workers=workers, servers=2, device="tcp").ok()
    mine = [seen_by_servers(name, rank, 4) for rank in range(workers)]
    values = [value.copy() for value in VALUES.values()]
    for step in range(4):
        for number, value in enumerate(values):
            exact = np.float32 if value.dtype == np.float16 else value.dtype
            total = sum((each[step][number] for each in mine[1:]), mine[0][step][number].astype(exact))
            values[number] = np.add(value, total, casting="same_kind", dtype=exact).astype(value.dtype)
            for seen, _ in results:
                np.testing.assert_array_equal(seen[step][number], values[number], err_msg=KEYS[number])
    whole = sum(value.nbytes for value in VALUES.values())
    for _, nbytes in results:
        assert nbytes < whole


def forget(job: tw.Job, path: str) -> list[float]:
    kv = KeyValue(rule="sum", compression="2bit(1)")
    kv.init("a", np.zeros(16, "f4"))
    seen = [float(kv.pushpull("a", np.full(16, 0.75, "f4")).wait()[0]) for _ in range(2)]
    if job.rank == 0:
        kv.save(path)
    kv.barrier()
    kv.load(path)
    seen += [float(kv.pushpull("a", np.full(16, 0.75, "f4")).wait()[0]) for _ in range(2)]
    return seen


def test_values_that_are_loaded_leave_nothing_out(tmp_path: Path) -> None:
    for seen in run_job(forget, str(tmp_path / "a.npz")).ok():
        assert seen == [0, 2, 2, 4]  # and not 4, 4, as the residual of 0.5 would make it


def misuse(job: tw.Job) -> list[float]:
    kv = KeyValue(compression="fp16")
    with pytest.raises(errors.Unsupported, match="compression computes in float32, and 'a' is of float64"):
        kv.init("a", np.zeros(3))
    kv.init("a", np.ones(3, "f4"))  # nothing was left behind
    found: list[float] = kv.pull("a").wait().tolist()
    return found


def test_what_cannot_be_coded_is_refused() -> None:
    assert run_job(misuse).ok() == [[1.0] * 3] * 2
