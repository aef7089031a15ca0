"""`KeyValue`: what pulls return is what the pushes of all workers, in the order of the mode, lead to."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.launch.worker import current_worker
from tensorwire.observe import counters
from tensorwire.store import SSP, Async, KeyValue, LocalSGD, Sync
from tensorwire.store.key_files import SavedArray, read_arrays, write_arrays
from tensorwire.testing.patience import patient
from tensorwire.trace.push_fates import problems, read_fates, totals
from tests.harness.jobs import for_each, run_job
from tests.levels import mostly_long

Array = np.ndarray[Any, Any]
BUCKET = 4096
VALUES: dict[str | int, Array] = {
    "wide": np.arange(12_000, dtype="f4").reshape(60, 200),  # cut into 12 buckets, and over servers
    "small": np.arange(5, dtype="f8"),
    "number": np.array(3.0, "f4"),
    "none": np.zeros((0, 3), "f4"),
    "half": np.linspace(-1, 1, 33, dtype="f2"),
    "counts": np.arange(70, dtype="i8"),
    7: np.full((3, 2, 2), 7, "u1"),
}
KEYS = list(VALUES)


def pushed(key: str | int, rank: int, step: int) -> Array:
    """What a worker pushes to a key in a step: whole numbers, whose sums have no order."""
    value = VALUES[key]
    return np.asarray((np.arange(value.size) % 5 + rank + 2 * step), value.dtype).reshape(value.shape)


# ---- rounds of all workers


def round_by_round(job: tw.Job, rule: str, reduce: str) -> list[list[Array]]:
    kv = KeyValue(rule=rule, reduce=reduce, bucket_bytes=BUCKET)
    kv.init(KEYS, list(VALUES.values()))
    seen = [kv.pull(KEYS).wait()]
    order = random.Random(job.rank)
    for step in range(4):
        for key in order.sample(KEYS, len(KEYS)):
            kv.push(key, pushed(key, job.rank, step))
        seen.append(kv.pull(KEYS).wait())
    return seen


RULES = [("assign", "sum"), ("sum", "sum"), ("sum", "mean"), ("mean", "sum")]


@pytest.mark.parametrize(("device", "servers"), [("shm", 1), ("shm", 2), ("tcp", 2)])
def test_a_pull_returns_the_round_of_the_last_push(device: str, servers: int) -> None:
    results = run_job(for_each, round_by_round, RULES, workers=3, servers=servers, device=device).ok()
    for (rule, reduce), *each in zip(RULES, *results, strict=True):
        check_rounds(each, rule, reduce)


def check_rounds(results: list[list[list[Array]]], rule: str, reduce: str) -> None:
    """What the workers saw, round after round, is what the rule makes of all pushes."""
    workers = len(results)
    for number, key in enumerate(KEYS):
        value = VALUES[key].copy()
        for step in range(5):
            for seen in results:
                np.testing.assert_array_equal(seen[step][number], value)
                assert seen[step][number].dtype == value.dtype
            total = sum(pushed(key, rank, step).astype("f8") for rank in range(workers))
            if rule == "mean" or reduce == "mean":
                floating = value.dtype.kind == "f"
                exact = np.float32 if value.dtype == np.float16 else value.dtype
                total = total.astype(exact) / np.array(workers, exact) if floating else total // workers
            value = (value + total if rule == "sum" else total).astype(value.dtype)


def train(job: tw.Job, mode: Sync | Async, steps: int, rule: str, options: dict[str, Any]) -> list[Array]:
    kv = KeyValue(mode, rule, reduce="mean", bucket_bytes=BUCKET, **options)
    kv.init(["wide", "half"], [VALUES["wide"], VALUES["half"]])
    rng = np.random.default_rng(job.rank)
    for step in range(steps):
        kv.set_options(lr=options["lr"] / (1 + step))
        for key in ("wide", "half"):
            kv.push(key, rng.standard_normal(VALUES[key].shape).astype(VALUES[key].dtype))
    values: list[Array] = kv.pull(["wide", "half"]).wait()
    return values


def stock(workers: int, steps: int, rule: str, options: dict[str, Any]) -> list[Array]:
    params = [torch.nn.Parameter(torch.from_numpy(VALUES[key].astype("f4"))) for key in ("wide", "half")]
    optimizer = getattr(torch.optim, rule)(params, **options)
    rngs = [np.random.default_rng(rank) for rank in range(workers)]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = options["lr"] / (1 + step)
        for p, key in zip(params, ("wide", "half"), strict=True):
            drawn = [torch.from_numpy(r.standard_normal(p.shape).astype(VALUES[key].dtype)).float() for r in rngs]
            p.grad = sum(drawn[1:], drawn[0]) / workers
        optimizer.step()
    return [p.detach().numpy().astype(VALUES[key].dtype) for p, key in zip(params, ("wide", "half"), strict=True)]


@pytest.mark.parametrize("mode", [Sync(), Async()])
@pytest.mark.parametrize(
    ("rule", "options"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", {"lr": 0.1, "betas": (0.8, 0.9)})]
)
def test_an_optimizer_on_the_servers_has_the_bits_of_the_stock_one(
    mode: Sync | Async, rule: str, options: dict[str, Any]
) -> None:
    workers = 2 if isinstance(mode, Sync) else 1
    expected = stock(workers, 5, rule, options)
    for found in run_job(train, mode, 5, rule, options, workers=workers, servers=2).ok():
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)


# ---- each push by itself


def add_at_own_pace(job: tw.Job) -> tuple[Array, list[float]]:
    kv = KeyValue(Async(), "sum")
    kv.init(["a", "b"], [np.zeros(3000, "f4"), np.zeros(2, "i4")])
    own, seen = 0.0, []
    for step in range(20 + 5 * job.rank):
        kv.push("a", np.full(3000, job.rank + 1, "f4"))
        own += job.rank + 1
        if step % 3 == job.rank:
            a = kv.pushpull(["a", "b"], [np.zeros(3000, "f4"), np.ones(2, "i4")]).wait()[0]
            assert (a == a[0]).all()  # a bucket of one version
            assert a[0] >= own  # its own pushes are in it
            seen.append(float(a[0]))
    kv.push("b", np.zeros(2, "i4")).wait()
    kv.push("a", np.zeros(3000, "f4")).wait()
    kv.barrier()
    return kv.pull("a").wait(), seen


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_every_push_is_applied_once(device: str, tmp_path: Path) -> None:
    results = run_job(add_at_own_pace, workers=3, device=device, fates=tmp_path).ok()
    for value, seen in results:
        np.testing.assert_array_equal(value, np.full(3000, 20 * 1 + 25 * 2 + 30 * 3, "f4"))
        assert seen == sorted(seen)
    found = read_fates([tmp_path])
    assert problems(found) == []
    for total in totals(found):
        assert total.produced == total.applied > 0


def pull_between_a_wait_and_its_end(job: tw.Job, mode: Async | SSP) -> float:
    """As another thread may: it asks for the value while this one is about to wait for the push."""
    kv = KeyValue(mode, "sum")
    kv.init("a", np.zeros(4, "f4"))
    pushed, begun = kv.push("a", np.ones(4, "f4")), []
    server = pushed._pushes[0].store.servers[0]

    def has_looked(subject: int) -> bool:
        begun.append(kv.pull("a"))
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "has_looked", has_looked)
        pushed.wait(patient(5.0))
    return float(begun[0].wait()[0])


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_thread_that_waits_for_a_push_is_not_held_up_by_anothers_pull(device: str) -> None:
    cases = [(Async(),), (SSP(1),)]
    assert run_job(for_each, pull_between_a_wait_and_its_end, cases, workers=1, device=device).ok() == [[1.0, 1.0]]


def run_ahead(job: tw.Job, staleness: int) -> list[float]:
    """Worker 0 pushes before worker 1 does; it may read as long as it is not too far ahead."""
    kv = KeyValue(SSP(staleness=staleness), "sum")
    kv.init("a", np.zeros(8, "f4"))
    seen = []
    if job.rank == 0:
        for _ in range(staleness):
            kv.push("a", np.ones(8, "f4"))
            seen.append(float(kv.pull("a").wait()[0]))
        kv.push("a", np.ones(8, "f4"))
        late = kv.pull("a")
        kv.push("a", np.zeros(8, "f4")).wait()  # pushes do not wait
        assert not late.done
        with pytest.raises(errors.WaitTimeout):
            late.wait(timeout=0.01)
        job.barrier()
        seen.append(float(late.wait()[0]))
    else:
        job.barrier()
        kv.push("a", np.full(8, 100, "f4")).wait()
    return seen


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_worker_that_is_too_far_ahead_reads_when_the_slowest_has_pushed(staleness: int) -> None:
    seen, _ = run_job(run_ahead, staleness).ok()
    assert seen == [*range(1, staleness + 1), staleness + 101]


# ---- any program


def any_program(job: tw.Job, seed: int, steps: int) -> None:
    """Each worker checks its pulls against the sums that all workers' programs lead to."""
    draw = random.Random(seed)
    kv = KeyValue(rule="sum", bucket_bytes=BUCKET)
    sizes = {f"k{i}": draw.choice([1, 7, 1024, 3000]) for i in range(4)}
    kv.init(list(sizes), [np.zeros(n, "f8") for n in sizes.values()])
    expected = dict.fromkeys(sizes, 0.0)
    waiting: list[tuple[Any, list[float], list[str]]] = []
    for step in range(steps):
        keys = draw.sample(list(sizes), draw.randint(1, len(sizes)))
        what = draw.choice(["push", "pull", "pushpull", "added"])
        if what == "added":
            name = f"later{step}"
            sizes[name], expected[name] = draw.choice([1, 2000]), float(step)
            kv.init(name, np.full(sizes[name], step, "f8"))
            continue
        if what != "pull":
            for key in keys:
                expected[key] += sum(rank + step for rank in range(job.num_workers))
        values = [np.full(sizes[key], job.rank + step, "f8") for key in keys]
        priority = random.Random(job.rank * 1000 + step).randint(-3, 3)
        if what == "push":
            waiting.append((kv.push(keys, values, priority=priority), [], []))
        else:
            call = kv.pull(keys, priority=priority) if what == "pull" else kv.pushpull(keys, values, priority=priority)
            waiting.append((call, [expected[key] for key in keys], keys))
        if draw.random() < 0.3:
            check(waiting)
    check(waiting)


def check(waiting: list[tuple[Any, list[float], list[str]]]) -> None:
    for handle, expected, keys in waiting:
        found = handle.wait()
        assert handle.done
        for value, number, key in zip(found or [], expected, keys, strict=True):
            np.testing.assert_array_equal(value, np.full(value.shape, number), err_msg=key)
    waiting.clear()


PROGRAMS = [(device, seed) for device in ("shm", "tcp") for seed in range(4)]


@pytest.mark.parametrize(("device", "seed"), mostly_long(PROGRAMS, [("shm", 0), ("shm", 1), ("tcp", 3)]))
def test_any_program_reads_what_was_pushed_before(device: str, seed: int) -> None:
    run_job(any_program, seed, 40, workers=2 + seed % 2, servers=1 + seed % 2, device=device).ok()


# ---- memory


def strange_arrays(job: tw.Job) -> None:
    kv = KeyValue(bucket_bytes=BUCKET)
    value = np.arange(3000, dtype="f4").reshape(30, 100)
    kv.init(["a", "b"], [value, np.zeros((4, 6), "f4")])
    kv.push(["a", "b"], [np.asfortranarray(value), torch.arange(48.0).reshape(8, 6)[::2]])
    out = np.empty((100, 30), "f4").T
    b = torch.empty(4, 6)
    results = kv.pull(["a", "b"], [out, b]).wait()
    assert results[0] is out
    np.testing.assert_array_equal(out, value)
    torch.testing.assert_close(b, torch.arange(48.0).reshape(8, 6)[::2])
    kv.push("b", [np.ones((4, 6), "f4"), torch.full((4, 6), 2.0), np.full((4, 6), 4, "f4")])  # of several devices
    np.testing.assert_array_equal(kv.pull("b").wait(), np.full((4, 6), 7))
    view = kv.pull("b", copy=False).wait()
    assert not view.flags.writeable
    first = kv.pull("b")
    kv.push("b", np.zeros((4, 6), "f4"))
    second = kv.pull("b")  # takes the value of the first before it may change
    np.testing.assert_array_equal(second.wait(), np.zeros((4, 6)))
    np.testing.assert_array_equal(first.wait(), np.full((4, 6), 7))
    np.testing.assert_array_equal(view, np.zeros((4, 6)))


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_arrays_may_be_strided_and_of_other_libraries(device: str) -> None:
    run_job(strange_arrays, workers=1, servers=2, device=device).ok()


def born_in_slots(job: tw.Job) -> tuple[int, int, int]:
    kv = KeyValue(Async(), "sum")
    kv.init("a", np.zeros(5000, "f4"))
    kv.slot("a")[:] = 1
    kv.push("a", kv.slot("a")).wait()
    before = counters.snapshot()
    for _ in range(3):
        slot = kv.slot("a")
        np.multiply(slot, 2, out=slot)
        kv.push("a", slot)
    kv.slot("a")
    used = counters.since(before)
    assert float(kv.pull("a").wait()[0]) == 1 + 2 + 4 + 8
    return used.copies, used.registrations, used.rpcs


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_what_is_computed_in_a_slot_is_not_copied(device: str) -> None:
    assert run_job(born_in_slots, workers=1, device=device).ok() == [(0, 0, 0)]


# ---- files


def push_views_of_the_slot(job: tw.Job) -> None:
    kv = KeyValue()
    kv.init("w", np.zeros((3, 3), "f4"))
    ones, first = np.ones((3, 3), "f4"), np.arange(9, dtype="f4").reshape(3, 3)

    def pushed(make: Callable[[Any], Any]) -> Any:
        slot = kv.slot("w")
        slot[:] = first
        kv.push("w", make(slot))
        return kv.pull("w").wait()

    np.testing.assert_array_equal(pushed(lambda s: s), first)
    np.testing.assert_array_equal(pushed(lambda s: s.T), first.T)
    np.testing.assert_array_equal(pushed(lambda s: s[::-1]), first[::-1])
    np.testing.assert_array_equal(pushed(lambda s: torch.from_numpy(s).T), first.T)
    np.testing.assert_array_equal(pushed(lambda s: np.broadcast_to(s[:1], (3, 3))), np.tile(first[0], (3, 1)))
    np.testing.assert_array_equal(pushed(lambda s: [s, ones]), first + 1)
    np.testing.assert_array_equal(pushed(lambda s: [ones, s]), first + 1)
    np.testing.assert_array_equal(pushed(lambda s: [s, s.T, s]), 2 * first + first.T)
    before = counters.snapshot()
    pushed(lambda s: s)
    assert counters.since(before).copies == 1  # that of the pull


def test_views_of_a_slot_are_pushed_as_they_are() -> None:
    run_job(push_views_of_the_slot, workers=1).ok()


def save_on_the_way(job: tw.Job, path: str, rule: str, stop: int, loads: bool) -> list[Array]:
    options = {"lr": 0.1} if rule == "Adam" else {}
    kv = KeyValue(rule=rule, reduce="mean", bucket_bytes=BUCKET, **options)
    rng = np.random.default_rng(job.rank)
    drawn = [[rng.standard_normal(VALUES[key].shape).astype(VALUES[key].dtype) for key in KEYS] for _ in range(6)]
    kv.init(KEYS, list(VALUES.values()))
    if loads:
        kv.load(path)
    for step in range(3 if loads else 0, stop):
        kv.push(KEYS, drawn[step])
        if step == 2 and not loads:
            kv.pull(KEYS).wait()
            kv.barrier()
            if job.rank == 1:
                kv.save(path)
            kv.barrier()
    values: list[Array] = kv.pull(KEYS).wait()
    return values


@pytest.mark.parametrize("rule", ["sum", "Adam"])
def test_a_file_continues_on_another_number_of_servers(rule: str, tmp_path: Path) -> None:
    path = str(tmp_path / "keys.npz")
    whole, _ = run_job(save_on_the_way, path, rule, 6, False, servers=1).ok()
    resumed, _ = run_job(save_on_the_way, path, rule, 6, True, servers=3, device="tcp").ok()
    for mine, theirs in zip(resumed, whole, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def assign_on_the_way(job: tw.Job, mode: Sync | Async) -> list[Array]:
    """Values are set between updates, whose optimizer goes on."""
    kv = KeyValue(mode, "SGD", bucket_bytes=4096, lr=1.0, momentum=0.5, compression="topk(0.25)")
    kv.init(["a", 3, "b"], [np.zeros(3000, "f4"), np.zeros((2, 0), "f4"), np.ones(7, "f4")])
    kv.push("a", np.ones(3000, "f4"))
    with pytest.raises(errors.ArgumentError, match="must be float32"):
        kv.assign("a", np.zeros(2))
    kv.assign(["b", "a"], [np.full(7, 5.0 + job.rank, "f4"), np.arange(3000, dtype="f4") + 10 * job.rank])
    seen: list[Array] = kv.pull(["a", "b"]).wait()
    kv.barrier()
    kv.push("a", np.zeros(3000, "f4")).wait()
    kv.barrier()
    return [*seen, kv.pull("a").wait()]


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_keys_are_set_to_worker_0s_values_and_the_optimizer_goes_on(device: str) -> None:
    for a, b, after in run_job(assign_on_the_way, Sync(), device=device, servers=2).ok():
        np.testing.assert_array_equal(a, np.arange(3000, dtype="f4"))
        np.testing.assert_array_equal(b, np.full(7, 5, "f4"))
        # A quarter of every bucket was pushed before; what was left out was dropped.
        moved = a - after
        assert set(np.unique(moved)) == {0.0, 1.0}, np.unique(moved)
        assert moved.sum() == 750
    for a, b, _ in run_job(assign_on_the_way, Async(), device=device).ok():
        np.testing.assert_array_equal(a, np.arange(3000, dtype="f4"))
        np.testing.assert_array_equal(b, np.full(7, 5, "f4"))


def load_what_does_not_fit(job: tw.Job, folder: str) -> list[str]:
    kv = KeyValue(rule="SGD", lr=0.1)
    kv.init("a", np.zeros(3, "f4"))
    good, other = f"{folder}/good.npz", f"{folder}/other.npz"
    if job.rank == 0:
        kv.save(good)
        Path(f"{folder}/damaged.npz").write_bytes(Path(good).read_bytes()[:-40])
        np.savez(f"{folder}/strange.npz", a=np.zeros(3))
        state = SavedArray("a", "momentum_buffer", rows=True)
        write_arrays(f"{folder}/state.npz", "SGD", [*read_arrays(good)[1], (state, np.zeros(3, "f4"))])
    wrong = KeyValue(rule="sum")
    wrong.init(["a", "b"], [np.zeros(3, "f4"), np.zeros(3, "f4")])
    if job.rank == 0:
        wrong.save(other)
    said = []
    for path in (
        other,
        f"{folder}/damaged.npz",
        f"{folder}/strange.npz",
        f"{folder}/missing.npz",
        f"{folder}/state.npz",
    ):
        with pytest.raises(errors.ArgumentError) as error:
            kv.load(path)
        said.append(str(error.value).replace(folder, ""))
    with pytest.raises(errors.ArgumentError) as error:
        wrong.load(good)
    said.append(str(error.value).replace(folder, ""))
    with pytest.raises(errors.ArgumentError, match="cannot write"):
        kv.save(f"{folder}/no/folder.npz")
    kv.push("a", np.ones(3, "f4"))
    np.testing.assert_allclose(kv.pull("a").wait(), -0.2)
    return said


def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    said, other = run_job(load_what_does_not_fit, str(tmp_path)).ok()
    assert said == other
    assert said[0] == "/other.npz is of the rule 'sum', and the keys have 'SGD'"
    assert "damaged.npz was not written by KeyValue.save(), or is damaged" in said[1]
    assert "strange.npz was not written by KeyValue.save(), or is damaged" in said[2]
    assert said[3] == "cannot read /missing.npz: No such file or directory"
    assert said[4] == "/state.npz does not fit: the state of 'a' has 'momentum_buffer', which SGD does not keep"
    assert said[5] == "/good.npz is of the rule 'SGD', and the keys have 'sum'"


# ---- refusals and failures


class OnCuda:
    """A tensor of a GPU, as others see it."""

    shape, dtype = (3,), "float32"

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **options: Any) -> Any:
        return np.ones(3, "f4").__dlpack__()


def misuse(job: tw.Job) -> None:
    def refused(match: str, call: Any, kind: type[Exception] = errors.ArgumentError) -> None:
        with pytest.raises(kind, match=match):
            call()

    refused("mode must be", lambda: KeyValue(LocalSGD()))  # type: ignore[arg-type]
    refused("damping", lambda: KeyValue(Async(damping=1.0)))
    refused("reduce must be", lambda: KeyValue(reduce="max"))
    refused("rule must be", lambda: KeyValue(rule=""))
    refused("'sum' has no options", lambda: KeyValue(rule="sum", lr=1))
    refused("the option lr must be", lambda: KeyValue(rule="SGD", lr=object()))
    kv = KeyValue(rule="SGD", lr=1)
    kv.init(["a", "b"], [np.zeros(3, "f4"), np.zeros(4, "f4")])
    ones = np.ones(3, "f4")
    refused("set the optimizer before", lambda: kv.set_optimizer("sum"))
    refused("no numeric option 'momentum'", lambda: kv.set_options(momentum=1))
    refused("lr must be a number", lambda: kv.set_options(lr="x"))  # type: ignore[arg-type]
    refused("exists already", lambda: kv.init("a", ones))
    refused("exists already", lambda: kv.init(["c", "c"], [ones, ones]))
    refused("2 keys need a list", lambda: kv.init(["c", "d"], [ones]))
    refused("bfloat16", lambda: kv.init("c", torch.zeros(3).bfloat16()), errors.Unsupported)
    refused("a key is a string or an integer", lambda: kv.init([1.5], [ones]))  # type: ignore[list-item]
    refused("there is no key 'c'", lambda: kv.push("c", ones))
    refused("only once", lambda: kv.push(["a", "a"], [ones, ones]))
    refused(r"must be float32\[3\], not float64\[3\]", lambda: kv.push("a", np.ones(3)))
    refused(r"must be float32\[3\], not float32\[4\]", lambda: kv.push("a", np.ones(4, "f4")))
    refused("has a shape and a dtype", lambda: kv.push("a", 3))
    refused("there is no array for key", lambda: kv.push("a", []))
    refused(r"must be float32\[4\]", lambda: kv.push(["a", "b"], [ones, ones]))
    refused("out for key 'a' must be", lambda: kv.pull("a", np.ones(4, "f4")))
    strange: list[Any] = [None, 1.5, True, b"a", iter("a"), [None], ["a"]]
    for key in strange:
        if key != ["a"]:
            refused("a key is a string or an integer, not", lambda key=key: kv.push(key, ones))
        refused("a key is a string or an integer, not", lambda key=key: kv.slot(key))
        refused("a key is a string or an integer, not", lambda key=key: kv.row_sparse_pull(key, [0]))
    refused("there is no key 1", lambda: kv.push(1, ones))
    refused("priority must be a whole number", lambda: kv.push("a", ones, priority="high"))  # type: ignore[arg-type]
    refused("priority must be a whole number", lambda: kv.pushpull("a", ones, priority=None))  # type: ignore[arg-type]
    refused("priority must be a whole number", lambda: kv.pull("a", priority=1.5))  # type: ignore[arg-type]
    refused("lr must be a number", lambda: kv.set_options(lr=10**400))
    refused("lr must be a number", lambda: KeyValue(rule="SGD", lr=10**400))
    refused("a masked array", lambda: kv.push("a", np.ma.array(ones, mask=True)))
    refused("a masked array", lambda: kv.push("a", [ones, np.ma.array(ones, mask=True)]))
    refused("a masked array", lambda: kv.init("c", np.ma.array(ones, mask=True)))
    refused("a masked array", lambda: kv.pull("a", np.ma.array(ones)))
    meaningless = {
        "resolve_neg": torch._neg_view(torch.ones(3)),  # type: ignore[attr-defined]
        "meta": torch.ones(3, device="meta"),
        r"detach\(\)": torch.ones(3, requires_grad=True),
        "layout": torch.ones(3).to_sparse(),
    }
    for match, tensor in meaningless.items():
        refused(match, lambda tensor=tensor: kv.init("c", tensor))
        refused(match, lambda tensor=tensor: kv.push("a", tensor))
        refused(match, lambda tensor=tensor: kv.push("a", [ones, tensor]))
        refused(match, lambda tensor=tensor: kv.pull("a", tensor))
    refused("is not on the CPU", lambda: kv.init("c", OnCuda()))
    kv.init("c", ones)
    pull = kv.pull("a")
    refused("timeout must be a number", lambda: pull.wait("1"))  # type: ignore[arg-type]
    refused("timeout must be a number", lambda: pull.wait(-1))
    fixed = ones.copy()
    fixed.flags.writeable = False
    refused("read-only", lambda: kv.pull("a", fixed))
    kv.push("a", ones)
    np.testing.assert_array_equal(kv.pull("a").wait(), -np.ones(3) * job.num_workers)  # nothing of it was pushed


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    run_job(misuse).ok()


def keys_of_all_kinds(job: tw.Job) -> None:
    kv = KeyValue()
    kv.init([np.int64(3), "3", "[3]", "'[3]", ""], [np.full(2, n, "f4") for n in range(5)])
    assert [value[0] for value in kv.pull([3, "3", "[3]", "'[3]", ""]).wait()] == [0, 1, 2, 3, 4]
    kv.push(np.uint8(3), np.full(2, 7, "f4"), priority=np.int8(1))  # type: ignore[arg-type]
    assert kv.pull(np.int32(3)).wait(np.inf)[0] == 7 * job.num_workers  # type: ignore[arg-type]
    assert [value[0] for value in kv.pull(np.array([3])).wait()] == [7 * job.num_workers]  # type: ignore[arg-type]


def test_numpys_integers_are_keys_and_no_two_keys_are_one() -> None:
    run_job(keys_of_all_kinds).ok()


def publish_nonsense(job: tw.Job) -> None:
    worker = current_worker()
    if job.rank == 0:
        worker.member.client.publish(worker.next_store(), b"\xc1")
    job.barrier()
    job.barrier(1e6)


def test_a_server_that_cannot_read_a_store_ends_the_job_in_one_line() -> None:
    ended = run_job(publish_nonsense)
    assert ended.cause is not None
    assert ended.cause.who == "server 0"
    assert ended.cause.what.startswith("cannot read what worker 0 wants in store/0: ")
    assert not ended.cause.traceback
    assert "\n" not in ended.cause.what


def begin(job: tw.Job, rule: str, options: dict[str, Any]) -> None:
    kv = KeyValue(rule=rule, **options)
    kv.init("a", np.zeros(3 + (job.rank if rule == "sum" else 0), "f4"))
    kv.push("a", np.zeros(3, "f4")).wait()


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        ("nonsense", {}, "there is no rule 'nonsense'; there are sum, mean, assign, ASGD"),
        ("SGD", {"lr": 0.1, "speed": 3}, "the optimizer SGD has no option 'speed'"),
        ("SGD", {"lr": -1}, "the optimizer SGD refuses its options: Invalid learning rate: -1"),
        ("sum", {}, "does not agree with worker"),  # which of the two is compared last is a matter of chance
    ],
)
def test_a_rule_that_servers_do_not_have_ends_the_job_in_one_line(
    rule: str, options: dict[str, Any], said: str
) -> None:
    ended = run_job(begin, rule, options)
    assert ended.cause is not None
    assert said in f"{ended.cause}" + "".join(ended.errors)


def die_in_a_round(job: tw.Job) -> str:
    kv = KeyValue()
    kv.init("a", np.zeros(3, "f4"))
    kv.pull("a").wait()
    kv.barrier()
    if job.rank == 1:
        os.kill(os.getpid(), 9)
    with pytest.raises(errors.JobEnded) as error:
        kv.push("a", np.ones(3, "f4")).wait()
    return str(error.value)


def test_a_killed_worker_ends_the_wait_of_the_others() -> None:
    ended = run_job(die_in_a_round)
    assert "worker 1" in ended.results[0]


def leave_early(job: tw.Job, mode: Sync | SSP, rule: str, options: dict[str, float]) -> list[float]:
    """Worker 1 leaves with pushes and pulls that nobody has answered; then worker 0 goes on."""
    kv = KeyValue(mode, rule, **options)
    kv.init(["a", "b"], [np.zeros(3, "f4"), np.zeros(2000, "f4")])
    if job.rank == 1:
        for _ in range(1 if isinstance(mode, Sync) else 3):
            kv.push(["a", "b"], [np.full(3, 10, "f4"), np.ones(2000, "f4")])
        kv.pull(["a", "b"])
        kv._finish()
    job.barrier()
    seen = []
    for _ in range(2 if job.rank == 0 else 0):
        kv.push("a", np.full(3, 20, "f4"))
        seen.append(float(kv.pull("a").wait()[0]))
    return seen


@pytest.mark.parametrize("device", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("mode", "rule", "options", "expected"),
    [
        (Sync(), "mean", {}, [15.0, 20.0]),
        (Sync(), "SGD", {"lr": 1.0, "momentum": 0.5}, [-30.0, -65.0]),
        (SSP(staleness=0), "sum", {}, [50.0, 70.0]),
    ],
)
def test_what_a_worker_pushed_before_it_left_counts_in_its_round(
    device: str, mode: Sync | SSP, rule: str, options: dict[str, float], expected: list[float]
) -> None:
    assert run_job(leave_early, mode, rule, options, device=device).ok()[0] == expected
