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


@pytest.mark.parametrize("name", CODES)
def test_a_pull_returns_what_the_codes_add_up_to(name: str) -> None:
    results = run_job(add, name, Sync(), servers=2, device="tcp").ok()
    mine = [seen_by_servers(name, rank, 4) for rank in range(2)]
    values = [value.copy() for value in VALUES.values()]
    for step in range(4):
        for number, value in enumerate(values):
            exact = np.float32 if value.dtype == np.float16 else value.dtype
            total = mine[0][step][number].astype(exact) + mine[1][step][number]
            values[number] = np.add(value, total, casting="same_kind", dtype=exact).astype(value.dtype)
            for seen, _ in results:
                np.testing.assert_array_equal(seen[step][number], values[number], err_msg=KEYS[number])
    whole = sum(value.nbytes for value in VALUES.values())
    for _, nbytes in results:
        assert nbytes < whole


def follow(job: tw.Job) -> list[list[Array]]:
    return [follow_with(job, name) for name in CODES]


def follow_with(job: tw.Job, name: str) -> list[Array]:
    kv = KeyValue(Async(), "SGD", lr=0.5, compression=name)
    kv.init("wide", VALUES["wide"])
    return [kv.pushpull("wide", pushed(job.rank, step)[0]).wait() for step in range(4)]


def test_an_optimizer_takes_what_the_codes_say() -> None:
    (results,) = run_job(follow, workers=1, device="shm").ok()
    for name, found in zip(CODES, results, strict=True):
        code = SimulatedCode(name, Async(), [torch.zeros(2500)])
        p = torch.nn.Parameter(torch.from_numpy(VALUES["wide"].copy()))
        optimizer = torch.optim.SGD([p], lr=0.5)
        for step in range(4):
            (seen,) = code.push([torch.from_numpy(pushed(0, step)[0].reshape(-1))], [])
            assert seen is not None
            p.grad = seen.view(50, 50)
            optimizer.step()
            np.testing.assert_array_equal(found[step], p.detach().numpy(), err_msg=name)


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


def misuse(job: tw.Job) -> list[str]:
    said = []
    for make in (
        lambda: KeyValue(compression="2bit(0)"),
        lambda: KeyValue(compression="zip"),
        lambda: KeyValue(compression="fp16").init("a", np.zeros(3)),
    ):
        with pytest.raises(errors.TensorwireError) as error:
            make()
        said.append(f"{type(error.value).__name__}: {error.value}")
    kv = KeyValue(compression="fp16")
    kv.init("a", np.ones(3, "f4"))  # nothing was left behind
    assert kv.pull("a").wait().tolist() == [1, 1, 1]
    return said


def test_what_is_no_compression_or_cannot_be_coded_is_refused() -> None:
    for threshold, name, dtype in run_job(misuse).ok():
        assert threshold.startswith("ArgumentError: 2bit needs a threshold above 0")
        assert name.startswith("ArgumentError: compression must be 'fp16', 'bf16'")
        assert dtype.startswith("Unsupported: compression computes in float32, and 'a' is of float64")
