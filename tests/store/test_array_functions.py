"""Rules that are functions of numpy arrays: for keys, for rows, saved and loaded, and without torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.store import Async, KeyValue, Sync
from tests.harness.jobs import in_turn, run_job
from tests.harness.sandbox import Sandbox
from tests.store.array_rules import momentum

RULE = "tests.store.array_rules:momentum"
SHAPES = {"wide": (70, 60), "half": (33,), "one": (), "none": (0, 3)}
STEPS = 5


def gradient(rank: int, step: int, name: str) -> Any:
    drawn = np.random.default_rng((rank, step, len(name))).standard_normal(SHAPES[name])
    return np.asarray(drawn, "f2" if name == "half" else "f4")


def first(name: str) -> Any:
    return np.full(SHAPES[name], 0.5, "f2" if name == "half" else "f4")


def push_all(kv: KeyValue, rank: int, steps: range) -> None:
    for step in steps:
        kv.set_options(lr=0.1 / (1 + step))
        for name in SHAPES:
            kv.push(name, gradient(rank, step, name))


def train(job: tw.Job, path: str, steps: range, loads: bool, elementwise: bool) -> list[Any]:
    kv = KeyValue(Sync(), RULE, bucket_bytes=4096, elementwise=elementwise, lr=0.1, momentum=0.9)
    kv.init(list(SHAPES), [first(name) for name in SHAPES])
    if loads:
        kv.load(path)
    push_all(kv, job.rank, steps)
    values: list[Any] = kv.pull(list(SHAPES)).wait()
    kv.barrier()
    if job.rank == 0 and not loads:
        kv.save(path)
    kv.barrier()
    return values


def alone(steps: int, workers: int) -> list[Any]:
    values, states = {name: first(name) for name in SHAPES}, {name: dict[str, Any]() for name in SHAPES}
    for step in range(steps):
        for name in SHAPES:
            drawn = [gradient(rank, step, name) for rank in range(workers)]
            total = drawn[0].astype("f4")
            for each in drawn[1:]:
                total += each
            momentum(
                values[name], total.astype(values[name].dtype), states[name], {"lr": 0.1 / (1 + step), "momentum": 0.9}
            )
    return list(values.values())


@pytest.mark.parametrize(
    ("device", "servers", "cut"),
    [("tcp", 2, (False, False)), ("tcp", 2, (True, True)), ("shm", 1, (False, True))],
)
def test_keys_have_the_values_of_the_function_alone_also_after_loading(
    device: str, servers: int, cut: tuple[bool, bool], tmp_path: Path
) -> None:
    """``cut``: whether the function gets flat parts of keys, before and after."""
    path = str(tmp_path / "keys.npz")
    for values in run_job(train, path, range(3), False, cut[0], servers=servers, device=device).ok():
        for mine, theirs in zip(values, alone(3, 2), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    for values in run_job(train, path, range(3, STEPS), True, cut[1], servers=3 - servers, device=device).ok():
        for mine, theirs in zip(values, alone(STEPS, 2), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def rows_of(step: int) -> Any:
    return np.sort(np.random.default_rng(step).choice(3000, 40, replace=False))


def train_rows(job: tw.Job, folder: str, steps: range, loads: bool) -> Any:
    kv = KeyValue(Async(), RULE, lr=0.1, momentum=0.9)
    kv.init_rows("table", (3000, 4))
    if loads:
        kv.load_rows("table", folder)
    for step in steps:
        kv.row_sparse_push("table", rows_of(step), np.full((40, 4), 1 + step, "f4")).wait()
    if not loads:
        kv.save_rows("table", folder)
    return kv.row_sparse_pull("table", np.arange(3000)).wait()


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_rows_have_the_values_of_the_function_given_these_rows(before: int, after: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "table")
    run_job(train_rows, folder, range(3), False, workers=1, servers=before).ok()
    (found,) = run_job(train_rows, folder, range(3, STEPS), True, workers=1, servers=after).ok()
    wanted, moved = np.zeros((3000, 4), "f4"), np.zeros((3000, 4), "f4")
    for step in range(STEPS):
        rows, state = rows_of(step), {"calls": step, "moved": moved[rows_of(step)]}
        part = wanted[rows]
        momentum(part, np.full((40, 4), 1 + step, "f4"), state, {"lr": 0.1, "momentum": 0.9})
        wanted[rows], moved[rows] = part, state["moved"]
    np.testing.assert_array_equal(found, wanted)


FADING = "tests.store.array_rules:fading"


def fade_rows(job: tw.Job) -> Any:
    kv = KeyValue(Async(), FADING, first=0.5, kinds=0)
    kv.init_rows("table", (3000, 2))
    for row in (2500, 7, 2500, 7, 7):
        kv.row_sparse_push("table", np.array([row]), np.ones((1, 2), "f4"))
    return kv.row_sparse_pull("table", np.array([0, 7, 2500])).wait()


def test_what_is_kept_for_a_row_begins_as_the_function_says() -> None:
    (found,) = run_job(fade_rows, workers=1, servers=2).ok()
    once = 0.25 + 1
    twice = once / 2 + 1
    np.testing.assert_array_equal(found[:, 0], [0, once + twice + twice / 2 + 1, once + twice])


def fade_keys(job: tw.Job, path: str) -> Any:
    kv = KeyValue(Sync(), FADING, bucket_bytes=4096, elementwise=True, first=0.5, kinds=1)
    kv.init("a", np.zeros(3000, "f4"))
    kv.push("a", np.ones(3000, "f4")).wait()
    kv.save(path)
    kv.push("a", np.ones(3000, "f4")).wait()
    kv.load(path)
    return kv.pushpull("a", np.ones(3000, "f4")).wait()


BODY = """
import numpy as np
from tensorwire.store import KeyValue
kv = KeyValue(rule={rule!r})
kv.init("a", np.full(2, 7, "f4"))
kv.push("a", np.zeros(2, "f4"))
print(kv.pull("a").wait().tolist())
"""


@pytest.mark.parametrize("rule", ["tests.store.array_rules:what_is_imported", "assign"])
def test_neither_workers_nor_servers_import_torch_for_it(rule: str, sandbox: Sandbox) -> None:
    root = str(Path(__file__).parents[2])
    result = sandbox.run(sandbox.script(BODY.format(rule=rule)), workers=1, PYTHONPATH=root).finish()
    assert (result.status, result.err) == (0, "")
    assert "[0.0, 0.0]" in result.out


ROW_WISE = "tests.store.array_rules:row_wise"


def train_row_wise(job: tw.Job, folder: str, steps: range) -> Any:
    kv = KeyValue(Async(), ROW_WISE)
    kv.init_rows("table", (3000, 3))
    if steps.start:
        kv.load_rows("table", folder)
    for step in steps:
        chosen = np.array([[0, 2999], [1, 2, 1500], [0, 1, 2], [5], [], [5, 2999]][step], "i8")
        kv.row_sparse_push("table", chosen, np.full((len(chosen), 3), 10.0 ** (2 - step), "f4")).wait()
    kv.save_rows("table", folder)
    return kv.row_sparse_pull("table", [0, 1, 2, 5, 1500, 2999]).wait()


def test_what_is_kept_for_a_row_may_have_any_shape(tmp_path: Path) -> None:
    folder = str(tmp_path / "table")
    run_job(train_row_wise, folder, range(2), workers=1, servers=2).ok()
    (found,) = run_job(train_row_wise, folder, range(2, 6), workers=1, servers=3).ok()
    after = lambda *pushed: -sum(g / np.sqrt(sum(x * x for x in pushed[: n + 1])) for n, g in enumerate(pushed))  # noqa: E731
    wanted = [after(100, 1), after(10, 1), after(10, 1), after(0.1, 0.001), after(10), after(100, 0.001)]
    np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-5)
    assert {each.name for each in (tmp_path / "table").iterdir()} == {
        "index.json",
        "values.npy",
        "%values.npy",
        "..%2Fx.npy",
    }


def keep_columns(job: tw.Job) -> None:
    kv = KeyValue(Async(), "tests.store.array_rules:column_wise")
    kv.init_rows("table", (8, 2))
    kv.row_sparse_push("table", [1, 2, 3], np.ones((3, 2), "f4")).wait()


def test_an_array_that_is_not_of_the_rows_is_refused_by_name() -> None:
    said = str(run_job(keep_columns, workers=1).cause)
    assert "keeps an array of the shape [2] as 'columns' after a push of 3 rows" in said
    assert "\n" not in said


def keep_strangely(job: tw.Job, path: str) -> list[Any]:
    kv = KeyValue(rule="tests.store.array_rules:keeps_strangely")
    kv.init("a", np.zeros(3, "f4"))
    kv.push("a", np.ones(3, "f4")).wait()
    kv.save(path)
    kv.push("a", np.ones(3, "f4")).wait()
    kv.load(path)
    return [*kv.pull("a").wait(), *kv.pushpull("a", np.ones(3, "f4")).wait()]


def keep_what_cannot_be_saved(job: tw.Job, path: str) -> list[float]:
    kv = KeyValue(rule="tests.store.array_rules:keeps_a_name")
    kv.init("a", np.zeros(3, "f4"))
    kv.push("a", np.zeros(3, "f4")).wait()
    with pytest.raises(
        errors.Unsupported, match="keeps 'name' of 'a' as a str, which is neither a number nor an array"
    ):
        kv.save(path)
    found: list[float] = kv.pull("a").wait().tolist()
    return found


def test_what_a_function_keeps_of_keys_is_saved_and_loaded_or_refused(tmp_path: Path) -> None:
    """What numpy takes for an array, and names that mean something elsewhere; neither a number nor an array."""
    programs = [
        partial(program, path=str(tmp_path / f"{number}.npz"))
        for number, program in enumerate((fade_keys, keep_strangely, keep_what_cannot_be_saved))
    ]
    ((faded, strange, refused),) = run_job(in_turn, *programs, workers=1, servers=2).ok()
    np.testing.assert_array_equal(faded, np.full(3000, 1.25 + 1.625, "f4"))
    assert strange == [-4.0] * 3 + [-12.0] * 3
    assert refused == [0.0] * 3


def rows_by_a_rule_of_tensors(job: tw.Job) -> None:
    kv = KeyValue(Async(), "tests.store.array_rules:of_tensors")
    kv.init_rows("table", (8, 2))
    kv.row_sparse_push("table", np.array([1]), np.ones((1, 2), "f4")).wait()


def test_rows_refuse_a_function_of_tensors() -> None:
    ended = run_job(rows_by_a_rule_of_tensors, workers=1)
    assert "rows take functions of numpy arrays" in str(ended.cause)


def give_a_function_of_arrays(job: tw.Job) -> str:
    with pytest.raises(errors.Unsupported) as raised:
        tw.torch.StoreOptimizer([("p", torch.nn.Parameter(torch.zeros(3)))], momentum, lr=0.1)
    return str(raised.value)


def test_an_optimizer_of_tensors_refuses_a_function_of_arrays() -> None:
    (said,) = run_job(give_a_function_of_arrays, workers=1).ok()
    assert "takes numpy arrays" in said
