"""Rows by their numbers: what pulls return is what the pushes of all workers, in the order of the mode, lead to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.keyvalue.row_table import most_rows
from tensorwire.observe import counters
from tensorwire.store import SSP, Async, KeyValue, Sync
from tensorwire.store.request_link import Request, RequestOperation
from tensorwire.store.row_layout import RowPlaces, TableSpec, divide, merge
from tensorwire.store.row_rules import draw
from tests.harness.jobs import run_job

Array = np.ndarray[Any, Any]
ROWS, WIDTH = 5000, 3


def batch(rank: int, step: int, size: int = 40) -> tuple[Array, Array]:
    """Numbers, some of which come several times, and rows of whole numbers, whose sums have no order."""
    rng = np.random.default_rng((rank, step))
    indices = rng.choice(rng.integers(0, ROWS, size), size * 2).reshape(2, size)
    return indices, rng.integers(-4, 5, (2, size, WIDTH)).astype("f4")


def first_values() -> Array:
    return np.random.default_rng(7).standard_normal((ROWS, WIDTH)).astype("f4")


# ---- sums


def add_rows(job: tw.Job, mode: Sync | Async | SSP, reduce: str, most: int) -> list[Array]:
    import tensorwire.keyvalue.key_value as module

    module.most_rows = lambda shape, dtype: most  # small, so that pushes and pulls take several requests
    kv = KeyValue(mode, "sum", reduce=reduce)
    kv.init_rows("table", (ROWS, WIDTH), values=np.round(first_values()))
    seen = []
    for step in range(4):
        indices, rows = batch(job.rank, step, size=40 if step != 2 else job.rank)  # and one without any row
        kv.row_sparse_push("table", indices, rows)
        seen.append(kv.row_sparse_pull("table", indices).wait())
    kv.row_sparse_push("table", np.arange(0), np.zeros((0, WIDTH), "f4")).wait()
    kv.barrier()
    return [*seen, kv.row_sparse_pull("table", np.arange(ROWS)).wait()]


def expected_sums(workers: int, reduce: str) -> list[Array]:
    value, after = np.round(first_values()), []
    for step in range(4):
        total = np.zeros_like(value)
        for rank in range(workers):
            indices, rows = batch(rank, step, size=40 if step != 2 else rank)
            np.add.at(total, indices, rows)
        value = value + (total / np.float32(workers) if reduce == "mean" else total)
        after.append(value)
    return after


@pytest.mark.parametrize(("device", "servers", "most"), [("shm", 1, 4096), ("shm", 2, 7), ("tcp", 3, 16)])
def test_a_pull_returns_the_round_of_the_last_push(device: str, servers: int, most: int) -> None:
    reduce = "mean" if servers == 2 else "sum"
    results = run_job(add_rows, Sync(), reduce, most, workers=2, servers=servers, device=device).ok()
    after = expected_sums(2, reduce)
    for rank, seen in enumerate(results):
        for step in range(4):
            indices, _ = batch(rank, step, size=40 if step != 2 else rank)
            np.testing.assert_array_equal(seen[step], after[step][indices])
        np.testing.assert_array_equal(seen[4], after[3])


@pytest.mark.parametrize("mode", [Async(), SSP(staleness=0)])
def test_pushes_that_are_applied_one_by_one_add_up(mode: Async | SSP) -> None:
    results = run_job(add_rows, mode, "sum", 16, workers=2, servers=2).ok()
    for seen in results:
        np.testing.assert_array_equal(seen[4], expected_sums(2, "sum")[3])


# ---- optimizers


OPTIMIZERS = [
    ("SGD", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    ("SparseAdam", {"lr": 1, "betas": (0.8, 0.95)}),
]


def train_rows(job: tw.Job, rule: str, options: dict[str, Any]) -> Array:
    kv = KeyValue(rule=rule, reduce="mean", **options)
    kv.init_rows("table", (ROWS, WIDTH), values=first_values())
    for step in range(4):
        kv.set_options(lr=options["lr"] / (1 + step))
        kv.row_sparse_push("table", *batch(job.rank, step))
    found: Array = kv.row_sparse_pull("table", np.arange(ROWS)).wait()
    return found


def stock(workers: int, rule: str, options: dict[str, Any], *, sparse: bool) -> Array:
    p = torch.nn.Parameter(torch.from_numpy(first_values()))
    optimizer = getattr(torch.optim, rule)([p], **options)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call] # or it warns
    for step in range(4):
        optimizer.param_groups[0]["lr"] = options["lr"] / (1 + step)
        found = [merge(i.reshape(-1), r.reshape(-1, WIDTH)) for i, r in (batch(rank, step) for rank in range(workers))]
        indices, rows = merge(np.concatenate([i for i, _ in found]), np.concatenate([r for _, r in found]))
        p.grad = torch.sparse_coo_tensor(
            torch.from_numpy(indices[None]), torch.from_numpy(rows / np.float32(workers)), p.shape, is_coalesced=True
        )
        if not sparse:
            p.grad = p.grad.to_dense()
        optimizer.step()
    return p.detach().numpy()


@pytest.mark.parametrize(("rule", "options"), OPTIMIZERS)
def test_an_optimizer_on_the_servers_has_the_bits_of_the_stock_one(rule: str, options: dict[str, Any]) -> None:
    expected = stock(2, rule, options, sparse=True)
    for found in run_job(train_rows, rule, options, workers=2, servers=2).ok():
        np.testing.assert_array_equal(found, expected)
    if rule != "SparseAdam":  # which treats rows without a gradient in another way than Adam
        np.testing.assert_allclose(expected, stock(2, rule, options, sparse=False), rtol=1e-5, atol=1e-7)


def push_at_both_ends(job: tw.Job) -> Array:
    kv = KeyValue(rule="SparseAdam", lr=0.1)
    kv.init_rows("table", (ROWS, WIDTH))
    for row in (0, 1, ROWS - 1, 0, ROWS - 1):
        kv.row_sparse_push("table", np.array([row]), np.ones((1, WIDTH), "f4"))
    found: Array = kv.row_sparse_pull("table", np.arange(ROWS)).wait()
    return found


def test_an_update_counts_on_every_server_wherever_its_rows_are() -> None:
    (expected,) = run_job(push_at_both_ends, workers=1, servers=1).ok()
    (found,) = run_job(push_at_both_ends, workers=1, servers=3).ok()
    np.testing.assert_array_equal(found, expected)


# ---- what travels


def count_bytes(job: tw.Job) -> tuple[int, int]:
    kv = KeyValue(Async(), "sum")
    kv.init_rows("table", (ROWS, 64), initial="normal", scale=0.5, seed=3)
    indices = np.arange(0, ROWS, 5)
    kv.row_sparse_pull("table", indices).wait()
    before = counters.snapshot()
    for _ in range(3):
        kv.row_sparse_push("table", indices, np.ones((len(indices), 64), "f4")).wait()
    written = counters.since(before)
    assert (written.rpcs, written.registrations) == (0, 0)
    return written.bytes, len(indices) * 64 * 4 * 3


def test_only_the_rows_that_are_named_travel() -> None:
    ((written, rows),) = run_job(count_bytes, workers=1, device="tcp").ok()
    assert rows < written <= 1.1 * rows


def make_values(job: tw.Job, initial: str) -> Array:
    kv = KeyValue(rule="sum")
    kv.init_rows("table", (4000, 2), "float64", initial=initial, scale=0.5, seed=3)
    found: Array = kv.row_sparse_pull("table", np.arange(4000)).wait()
    return found


@pytest.mark.parametrize("initial", ["normal", "uniform", "zeros"])
def test_first_values_are_the_same_on_any_number_of_servers(initial: str) -> None:
    one, three = (run_job(make_values, initial, workers=1, servers=n).ok()[0] for n in (1, 3))
    np.testing.assert_array_equal(one, three)
    assert len(np.unique(one)) == (1 if initial == "zeros" else one.size)
    assert abs(one.std() - {"normal": 0.5, "uniform": 0.5 / 3**0.5, "zeros": 0}[initial]) < 0.02
    part = np.empty((700, 2))
    draw(TableSpec(1, initial, 0.5, 3), part, 900)
    np.testing.assert_array_equal(part, one[900:1600])


# ---- refusals, and ends


def refused(text: str, call: Any) -> None:
    with pytest.raises(errors.TensorwireError, match=text):
        call()


def misuse(job: tw.Job) -> None:
    kv = KeyValue(rule="sum")
    kv.init("dense", np.zeros(3))
    refused("'mean' has no options|must be", lambda: kv.init_rows("t", (3, 2), initial="ones"))
    refused("exists already", lambda: kv.init_rows("dense", (3, 2)))
    refused("not the shape", lambda: kv.init_rows("t", (0, 2)))
    refused("rows under 'sum' hold", lambda: kv.init_rows("t", (3, 2), "float16"))
    for shape in ((-2, -3), (4, -2), (2.5, 4), (True, 4), (-1, 4), (), 3, None, "ab", (2**31 + 1, 2), (2**31, 2**400)):
        refused("not the shape", lambda shape=shape: kv.init_rows("t", shape))
    refused("take more than 4194304 buckets", lambda: kv.init_rows("t", (2**31, 2**20)))
    for dtype in ("nope", "bfloat16", None, 3):
        refused("'t' has dtype", lambda dtype=dtype: kv.init_rows("t", (3, 2), dtype))
    for number in ("1", None, 10**400, float("nan")):
        refused("scale must be", lambda number=number: kv.init_rows("t", (3, 2), scale=number))
    refused("seed must be", lambda: kv.init_rows("t", (3, 2), seed=-1))
    refused(r"must be float32\[3, 2\]", lambda: kv.init_rows("t", (3, 2), values=np.zeros((3, 2))))
    kv.init_rows("t", (np.int64(3), 2), np.float32)  # type: ignore[arg-type]
    refused("exists already", lambda: kv.init("t", np.zeros(3)))
    refused("no key 'dense' with rows", lambda: kv.row_sparse_push("dense", [0], np.zeros((1, 2), "f4")))
    refused("no row 3", lambda: kv.row_sparse_push("t", [0, 3], np.zeros((2, 2), "f4")))
    refused("no row -1", lambda: kv.row_sparse_pull("t", [-1]))
    refused("no row 18446744073709551615", lambda: kv.row_sparse_pull("t", [2**64 - 1]))
    refused("a masked array", lambda: kv.row_sparse_push("t", [0], np.ma.array(np.ones((1, 2), "f4"), mask=True)))
    refused("a masked array", lambda: kv.row_sparse_pull("t", np.ma.array([0], mask=True)))
    refused("not the shape|must be float32", lambda: kv.row_sparse_push("t", [], np.zeros((1, 2), "f4")))
    assert kv.row_sparse_pull("t", []).wait().shape == (0, 2)
    kv.row_sparse_push("t", [], []).wait()
    refused("integers, not float64", lambda: kv.row_sparse_pull("t", [0.5]))
    refused(r"float32\[2, 2\], not float32\[1, 2\]", lambda: kv.row_sparse_push("t", [0, 1], np.zeros((1, 2), "f4")))
    refused("out for 't'", lambda: kv.row_sparse_pull("t", [0], np.zeros((1, 3), "f4")))
    refused("set the optimizer before", lambda: kv.set_optimizer("assign"))
    out = np.full((2, 2), 9, "f4")
    kv.row_sparse_pull("t", [2, 2], out).wait()
    np.testing.assert_array_equal(out, np.zeros((2, 2)))


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    run_job(misuse, workers=2).ok()


def wait_twice(job: tw.Job) -> Array:
    """After a pull that was given up, a wait ends when the rows of server 0 have been read, and no others."""
    kv = KeyValue(Async(), "sum")
    kv.init_rows("table", (ROWS, WIDTH), values=first_values())
    table = kv._tables["table"]
    table.client.ask(np.array([1, ROWS - 1]), table.options)
    late = table.client.servers[1]
    pull = kv.row_sparse_pull("table", np.arange(ROWS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late, "take", lambda *_: (_ for _ in ()).throw(errors.WaitTimeout("late")))
        with pytest.raises(errors.WaitTimeout):
            pull.wait()
    found: Array = pull.wait(10)
    return found


def test_a_wait_for_rows_may_be_repeated() -> None:
    (found,) = run_job(wait_twice, workers=1, servers=2).ok()
    np.testing.assert_array_equal(found, first_values())


def pull_short_answers(job: tw.Job, lacking: int) -> None:
    kv = KeyValue(Async(), "sum")
    kv.init_rows("table", (ROWS, WIDTH), values=first_values())
    whole = RowPlaces.answered
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowPlaces, "answered", lambda *a: (whole(*a)[0] - lacking, False))
        with pytest.raises(
            errors.ProtocolError, match=f"answered with {ROWS - lacking} rows, and was asked for {ROWS}"
        ):
            kv.row_sparse_pull("table", np.arange(ROWS)).wait(10)


@pytest.mark.parametrize("lacking", [1, ROWS])
def test_an_answer_of_other_rows_than_were_asked_for_is_refused(lacking: int) -> None:
    run_job(pull_short_answers, lacking, workers=1).ok()


def begin(job: tw.Job, rule: str, options: dict[str, Any]) -> None:
    KeyValue(rule=rule, **options).init_rows("t", (3 + (job.rank if rule == "sum" else 0), 2))


@pytest.mark.parametrize(
    ("rule", "options", "text"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}, "changes all rows in every step"),
        ("AdamW", {"lr": 0.1}, "no rule 'AdamW' for rows"),
        ("Adagrad", {"lr": -1.0}, "Adagrad refuses its options"),
        ("sum", {}, "does not agree with worker"),
    ],
)
def test_a_rule_that_is_none_for_rows_is_refused_in_one_line(rule: str, options: dict[str, Any], text: str) -> None:
    ended = run_job(begin, rule, options)
    assert ended.cause is not None
    assert text in f"{ended.cause}" + "".join(ended.errors)


def test_a_dtype_that_numpy_lacks_is_refused_before_there_is_a_table() -> None:
    with pytest.raises(errors.Unsupported, match="has dtype bfloat16; rows hold float32"):
        most_rows((3, 2), "bfloat16")


def leave_early(job: tw.Job, mode: Sync | SSP) -> float:
    kv = KeyValue(mode, "sum")
    kv.init_rows("t", (10, 2))
    if job.rank == 1:
        kv.row_sparse_push("t", [1], np.ones((1, 2), "f4"))
        return 0.0
    for _ in range(3):
        kv.row_sparse_push("t", [1], np.ones((1, 2), "f4"))
    found: Array = kv.row_sparse_pull("t", [1]).wait()
    return float(found[0, 0])


@pytest.mark.parametrize("mode", [Sync(), SSP(staleness=0)])
def test_a_worker_may_leave_without_waiting(mode: Sync | SSP) -> None:
    value, _ = run_job(leave_early, mode, workers=2).ok()
    assert value == 4


# ---- parts


@pytest.mark.parametrize(("rows", "servers"), [(1, 3), (10, 3), (5000, 2), (5000, 7), (1024, 1)])
def test_rows_are_divided_without_gaps(rows: int, servers: int) -> None:
    starts = divide(rows, servers)
    assert len(starts) == servers + 1
    assert (starts[0], starts[-1]) == (0, rows)
    assert starts == sorted(starts)


@pytest.mark.parametrize("numbers", [1, 5, 300, 10**6])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 2000])
def test_rows_of_one_number_are_summed_in_their_order(numbers: int, count: int) -> None:
    rng = np.random.default_rng(count)
    indices, rows = rng.integers(0, numbers, count), rng.standard_normal((count, WIDTH)).astype("f4")
    found, sums = merge(indices, rows)
    expected = np.zeros((numbers, WIDTH), "f4")
    np.add.at(expected, indices, rows)
    np.testing.assert_array_equal(found, np.unique(indices))
    np.testing.assert_array_equal(sums, expected[found])


def test_a_malformed_request_is_refused() -> None:
    places = RowPlaces(4, (3,), "float32")
    place = memoryview(bytearray(places.nbytes))
    places.indices(place, 2)[:] = [1, 10]
    request = Request(RequestOperation.PUSH, 1, 0, b"", (2, 0))
    with pytest.raises(errors.ProtocolError, match="row 10"):
        places.request(place, request, 1, 10)
    assert places.request(place, request, 1, 11).rows is not None
    for numbers in ((), (5, 0), (1, 0, 0)):
        with pytest.raises(errors.ProtocolError):
            places.request(place, request._replace(numbers=numbers), 1, 11)
    places.head(place, 5, False)
    with pytest.raises(errors.ProtocolError):
        places.answered(place)


def test_a_pull_is_divided_where_it_is_large() -> None:
    places = RowPlaces(4096, (64,), "float32")
    assert [places.part(count) for count in (1, 512, 1024, 1025, 4096, 20000)] == [512, 512, 512, 513, 2048, 4096]
    assert RowPlaces(7, (64,), "float32").part(4096) == 7
    assert RowPlaces(4, (1 << 20,), "float32").part(3) == 2
