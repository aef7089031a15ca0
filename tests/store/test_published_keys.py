"""Versions for readers of keys and of rows: what they contain, when, and what becomes of them."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire import Job
from tensorwire.errors import ArgumentError, StepInterrupted
from tensorwire.observe import counters
from tensorwire.store import SSP, Async, Every, KeyValue, Sync
from tensorwire.store.request_link import RequestOperation
from tensorwire.store.versions.version_files import job_folder
from tests.harness.cable import until
from tests.harness.interrupts import interrupt_at
from tests.harness.jobs import run_job
from tests.levels import mostly_long
from tests.store.test_versions import reading, second_apart

Mode = Sync | Async | SSP
ROWS, WIDTH = 3000, 6
MANY = 400_000  # rows of 24 bytes: three buckets


def filled(job: Job, device: str, mode: Mode) -> list[tuple[str, int]]:
    """Random pushes to keys of every kind and to tables; worker 0 compares each version with a pull of all."""
    kv = KeyValue(mode, "sum", publish=True, bucket_bytes=4096)
    rng = np.random.default_rng(job.rank)
    first = {"w": np.arange(5001, dtype="f4"), 7: np.full((2, 3), 2**40), "7": np.array(3.5), "none": np.zeros((0, 4))}
    kv.init([*first], [*first.values()])
    kv.init("late", np.ones((3, 3), "f2"))
    kv.init_rows("table", (ROWS, WIDTH), initial="normal", seed=4)
    kv.init_rows("few", (3, 2, 2), "float64", initial="uniform")
    arrays = {**first, "late": np.ones((3, 3), "f2")}
    tables = {"table": (ROWS, (WIDTH,), "f4"), "few": (3, (2, 2), "f8")}
    wrong = []
    for turn in range(4):
        for key, value in arrays.items():
            kv.push(key, (rng.standard_normal(value.shape) * 9).astype(value.dtype))
        for name, (rows, row, dtype) in tables.items():
            numbers = rng.choice(rows, int(rng.integers(rows)), replace=False)
            kv.row_sparse_push(name, numbers, rng.standard_normal((len(numbers), *row)).astype(dtype))
        counter = kv.publish(step=10 * turn)
        if job.rank == 0:
            with reading(job, device) as reader:
                version, found = reader.pull(counter)
                assert (version.counter, version.step) == (1 + turn, 10 * turn)
                wanted = dict(zip(arrays, kv.pull([*arrays]).wait(), strict=True))
                wanted |= {name: kv.row_sparse_pull(name, np.arange(of[0])).wait() for name, of in tables.items()}
                names = {7: "[7]"}
                assert {names.get(key, key) for key in wanted} == found.keys()  # type: ignore[call-overload]
                for key, value in wanted.items():
                    got = found[names.get(key, key)].numpy()  # type: ignore[call-overload]
                    if got.dtype != value.dtype or got.shape != value.shape or not (got == value).all():
                        wrong.append((str(key), turn))
                reader.stage(counter).close()  # compares checksums
        job.barrier()
    kv.close()
    return wrong


CASES = [("auto", Sync(), 1), ("tcp", Sync(), 3), ("auto", Async(), 3), ("auto", SSP(1), 2)]


@pytest.mark.parametrize(("device", "mode", "servers"), CASES, ids=repr)
def test_a_version_has_what_a_pull_of_everything_brings(device: str, mode: Mode, servers: int) -> None:
    workers = 2 if isinstance(mode, Sync) else 1  # elsewhere others would push between the version and the pull
    for wrong in run_job(filled, device, mode, workers=workers, servers=servers).ok():
        assert wrong == []


def test_servers_on_other_machines_send_their_keys_and_rows() -> None:
    for wrong in run_job(filled, "auto", Sync(), servers=2, device="tcp", prepare=second_apart).ok():
        assert wrong == []


def ahead(job: Job) -> list[set[float]]:
    """Worker 1 has pushed what the next round takes, before worker 0 publishes; and pushes on at once."""
    kv = KeyValue(Sync(), "sum", publish=True)
    kv.init("w", np.zeros(50))
    kv.init_rows("t", (40, 2))
    kv.publish()
    seen = []
    for number in range(1, 4):
        pushes = [kv.push("w", np.ones(50)), kv.row_sparse_push("t", np.arange(40), np.ones((40, 2), "f4"))]
        if job.rank:
            if number > 1:
                job.barrier()
            continue
        for push in pushes:
            push.wait()
        if number < 3:
            job.barrier()  # worker 1 has begun its next round
            counter = kv.publish()
            with reading(job) as reader:
                _, found = reader.pull(counter)
            seen.append({float(v) for tensor in found.values() for v in tensor.reshape(-1)})
    kv.close()
    return seen


def test_a_round_that_has_begun_is_not_in_it() -> None:
    assert run_job(ahead).ok()[0] == [{2.0}, {4.0}]


# ---- what changes while a version is filled


def late_filler() -> None:
    """Servers fill versions when a pull of a key has come after the cut."""
    from tensorwire.store.key_server import KeyServer
    from tensorwire.store.versions.snapshots import Snapshots

    pulled = threading.Event()
    fill: Callable[[Any], None] = Snapshots._fill
    handle: Callable[..., bool] = KeyServer.handle

    def later(self: Any) -> None:
        pulled.wait()
        pulled.clear()
        fill(self)

    def handled(self: Any, worker: int, request: Any) -> bool:
        found = handle(self, worker, request)
        if request.operation is RequestOperation.PULL:
            pulled.set()
        return found

    Snapshots._fill = later  # type: ignore[method-assign]
    KeyServer.handle = handled  # type: ignore[method-assign]


def changed_before_copied(job: Job, mode: Mode, change: str) -> dict[str, set[float]]:
    """A version, and then changes before the thread that fills it has begun. What a version has."""
    kv = KeyValue(mode, "sum", publish=True, bucket_bytes=4096)
    kv.init(["w", "turn"], [np.ones(5000), np.zeros(1)])
    kv.init_rows("t", (MANY, WIDTH), values=np.ones((MANY, WIDTH), "f4"))
    counter = kv.publish()
    if change == "push":
        kv.push("w", np.ones(5000))
        kv.row_sparse_push("t", [MANY // 2, MANY - 1], np.ones((2, WIDTH), "f4"))
        kv.row_sparse_pull("t", [0]).wait()
    elif change == "assign":
        kv.assign("w", np.full(5000, 3.0))
        if job.rank == 0:
            kv._tables["t"].assign(np.full((MANY, WIDTH), 3, "f4"))
    elif change == "file":
        with tw.files.connect(job.name) as folder, folder.open("push/w", "wb") as file:
            file.write(np.ones(5000))  # type: ignore[union-attr]
    kv.pull("w").wait()
    seen = {}
    if job.rank == 0:
        kv.pull("turn").wait()
        with reading(job) as reader:
            _, found = reader.pull(counter)
            assert found.pop("turn").tolist() == [0.0]
            seen = {name: {float(v) for v in tensor.reshape(-1)} for name, tensor in found.items()}
    kv.close()
    return seen


@pytest.mark.parametrize(("mode", "change"), [*product([Sync(), Async()], ["push", "assign"]), (Async(), "file")])
def test_what_comes_later_is_not_in_it(mode: Mode, change: str) -> None:
    workers = 2 if isinstance(mode, Sync) else 1  # elsewhere others would push before the version
    first, *_ = run_job(changed_before_copied, mode, change, workers=workers, prepare=late_filler).ok()
    assert first == {"w": {1.0}, "t": {1.0}}


def raced(job: Job, versions: int) -> int:
    """Buckets change at any time, and each is copied at one moment: all elements of one have had as many updates."""
    kv = KeyValue(Async(), "sum", publish=Every(buffers=3))
    kv.init("w", np.zeros(1 << 20))
    kv.init_rows("t", (MANY, WIDTH))
    kv.publish()
    done = 0
    ones, rows = np.ones(1 << 20), np.ones((MANY, WIDTH), "f4")
    while not job.broadcast(float(done >= versions)):
        kv.push("w", ones)
        kv.row_sparse_push("t", np.arange(MANY), rows)
        if job.rank:
            continue
        counter = kv.publish()
        if counter is None:
            continue
        with reading(job) as reader:
            opened = reader._open(counter, 60.0)
            assert opened.data is not None
            for (place,), updates in zip(reader._layout.buckets, opened.manifest.updates, strict=True):
                dtype = np.float64 if [*reader.tensors][place.tensor] == "w" else np.float32
                at = place.file - reader._layout.data
                values = opened.data[at : at + place.nbytes].view(dtype)
                assert values.min() == values.max() == updates
            opened.close()
        done += 1
    kv.close()
    return done


def test_no_push_shows_in_the_middle_of_a_bucket() -> None:
    assert run_job(raced, 40, workers=3).ok()[0] == 40


# ---- rows on demand


def some_rows(job: Job, device: str) -> list[Any]:
    kv = KeyValue(Sync(), "sum", publish=True)
    kv.init("w", np.arange(12.0).reshape(3, 4))
    kv.init_rows("t", (ROWS, WIDTH), initial="normal")
    counter = kv.publish()
    table = kv.row_sparse_pull("t", np.arange(ROWS)).wait()
    found: list[Any] = []
    with reading(job, device) as reader:
        for numbers in ([5, 6, 7, ROWS - 1, 0, 5], np.array([2], np.uint64), []):
            before = counters.snapshot()
            _, got = reader.pull(counter, rows={"t": numbers})
            assert [*got] == ["t"]
            np.testing.assert_array_equal(got["t"].numpy(), table[np.asarray(numbers, int)])
            found.append(counters.since(before).copied_bytes)
        _, got = reader.pull(counter, rows={"t": [4], "w": [2, 0]}, slices=None, names=["w", "t"])
        assert got["w"].tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
        into = {"t": got["t"].new_empty(2, WIDTH), "w": got["w"].new_empty(1, 4)}
        reader.pull(counter, rows={"t": [9, 8]}, slices={"w": (slice(1, 2),)}, into=into)
        np.testing.assert_array_equal(into["t"].numpy(), table[[9, 8]])
        assert into["w"].tolist() == [[4, 5, 6, 7]]
        for rows, message in [
            ({"t": [ROWS]}, f"'t' has rows 0 to {ROWS - 1}, and no row {ROWS}"),
            ({"t": [-1]}, "no row -1"),
            ({"t": [0.5]}, "whole numbers"),
            ({"t": [True]}, "whole numbers"),
            ({"t": 3}, "whole numbers"),
            ({"t": [[1]]}, "whole numbers"),
            ({"x": [1]}, "no tensor 'x'"),
        ]:
            with pytest.raises(ArgumentError, match=message):
                reader.pull(counter, rows=rows)
        with pytest.raises(ArgumentError, match="'t' has slices and rows"):
            reader.pull(counter, rows={"t": [1]}, slices={"t": (slice(1),)})
    job.barrier()
    kv.close()
    return found


@pytest.mark.parametrize("device", ["auto", "tcp"])
def test_a_reader_gets_the_rows_that_it_names(device: str) -> None:
    for copied in run_job(some_rows, device, servers=2).ok():
        assert device == "tcp" or copied == [6 * WIDTH * 4, WIDTH * 4, 0]


# ---- the calls


def calls(job: Job) -> list[Any]:
    kv = KeyValue(Sync(), "assign")
    with pytest.raises(ArgumentError, match="construct it with publish=True"):
        kv.publish()
    kv.close()
    with pytest.raises(ArgumentError, match=r"no steps to count: .* not Every\(steps=5"):
        KeyValue(publish=Every(5))
    kv = KeyValue(Sync(), "assign", publish=Every(when_held="skip"))
    with pytest.raises(ArgumentError, match="no keys to publish"):
        kv.publish()
    with pytest.raises(ArgumentError, match="the first publish"):
        kv.readers()
    kv.init("w", np.zeros(3))
    for step in (-1, True, 1.5, 2**63):
        with pytest.raises(ArgumentError, match="step must be"):
            kv.publish(step=step)  # type: ignore[arg-type]
    made: list[Any] = [kv.publish(if_asked=True)]  # which every worker calls, and nobody has asked
    with pytest.raises(ArgumentError, match="make key 'v' before the first publish"):
        kv.init("v", np.zeros(3))
    with pytest.raises(ArgumentError, match="make key 't' before the first publish"):
        kv.init_rows("t", (3, 2))
    with reading(job) as reader:
        if job.rank == 0:
            assert reader.newest() == 0
            reader.ask()
            while (counter := kv.publish(if_asked=True)) is None:
                pass
            made += [counter, kv.publish(if_asked=True)]
            staged = reader.stage(1)
            staged.commit(_module(3))
            assert [each.counter for each in kv.readers()] in ([1], [1, 0], [0, 1])
            made += [kv.publish(), kv.publish()]  # the second finds no buffer: version 1 is held
            staged.close()
            assert staged.version.run == 0
        job.barrier()
    kv.close()
    return made


def _module(size: int) -> Any:
    torch = pytest.importorskip("torch")
    module = torch.nn.Module()
    module.register_parameter("w", torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)))
    return module


def test_calls_of_publish() -> None:
    first, second = run_job(calls).ok()
    assert first == [None, 1, None, 2, None]
    assert second == [None]


def loaded(job: Job, path: str, of_rows: bool) -> list[tuple[int, float]]:
    kv = KeyValue(Sync(), "sum", publish=True)
    if of_rows:
        kv.init_rows("w", (3, 2))
    else:
        kv.init("w", np.zeros((3, 2), "f4"))
    push = partial(kv.row_sparse_push, "w", [0, 1, 2]) if of_rows else partial(kv.push, "w")
    push(np.ones((3, 2), "f4")).wait()
    kv.publish()
    if job.rank == 0:
        kv.save_rows("w", path) if of_rows else kv.save(path)
    job.barrier()
    push(np.full((3, 2), 5, "f4")).wait()
    kv.load_rows("w", path) if of_rows else kv.load(path)
    kv.publish()
    found = []
    with reading(job) as reader:
        version, tensors = reader.pull(2)
        found.append((version.run, float(tensors["w"][2, 1])))
    job.barrier()
    kv.close()
    return found


@pytest.mark.parametrize("of_rows", [False, True])
def test_loading_begins_a_new_run(tmp_path: Any, of_rows: bool) -> None:
    assert run_job(loaded, str(tmp_path / "saved.npz"), of_rows).ok() == [[(1, 2.0)]] * 2


def interrupted(job: Job, seed: int, trials: int, log: str) -> None:
    """Each trial interrupts one publish(); then that of the next value is refused, or is a version of that."""
    draw, found, lines = random.Random(seed), [], 0
    for number in range(trials):
        kv = KeyValue(Sync(), "assign", publish=Every(when_held="wait"))
        kv.init("w", np.zeros(2000))
        kv.publish()
        lines = lines or interrupt_at(kv.publish, 0)
        kv.push("w", np.ones(2000)).wait()
        try:
            interrupt_at(kv.publish, draw.randint(1, lines))
            found.append("missed")
        except KeyboardInterrupt:
            try:
                kv.push("w", np.full(2000, 2.0))
                counter = kv.publish()
            except StepInterrupted:
                found.append("refused")
            else:
                with reading(job, number=number) as reader:
                    _, tensors = reader.pull(counter)
                    assert set(tensors["w"].tolist()) == {2.0}, counter
                found.append("completed")
        Path(log).write_text(" ".join(found))


@pytest.mark.parametrize(("seed", "trials"), mostly_long([(1, 10), *((n, 60) for n in range(2, 6))], [(1, 10)]))
def test_what_is_interrupted_goes_on_or_is_refused(seed: int, trials: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ended = run_job(interrupted, seed, trials, str(log), workers=1, servers=2)
    found = log.read_text().split()
    assert len(found) == trials, ended
    assert "completed" in found
    told = [f"{ended.cause}", *ended.errors]
    assert all("StepInterrupted" in each and "KeyboardInterrupt" in each for each in told) == ("refused" in found), told


def two_of_them(job: Job) -> list[float]:
    """Two stores of keys, and an optimizer between them; what is dropped or closed goes."""
    torch = pytest.importorskip("torch")
    one = KeyValue(Sync(), "assign", publish=True)
    one.init("w", np.ones(3))
    one.publish()
    p = torch.nn.Parameter(torch.full((2,), 2.0))
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=0.1, publish=True)
    two = KeyValue(Async(), "assign", publish=True)
    two.init("w", np.full(3, 3.0))
    two.publish()
    found = []
    for number in range(3):
        with reading(job, number=number) as reader:
            _, tensors = reader.pull(1)
            found += [float(tensor[0]) for tensor in tensors.values()]
    folder = job_folder(job.name)
    there = sorted(path.name for path in folder.iterdir() if path.name.startswith("store"))
    job.barrier()
    two.close()
    del one
    gc.collect()
    third = KeyValue(Async(), "assign")  # what was dropped ends with the next store
    third.init("w", np.zeros(1))
    job.barrier()
    left = {f"{name}{end}" for name in (optimizer._client.name.replace("/", "-"),) for end in ("", ".socket")}
    until(lambda: {path.name for path in folder.iterdir() if path.name.startswith("store")} == left)
    assert len(there) == 6, there
    third.close()
    optimizer.close()
    return found


def test_several_publish_and_end_by_themselves() -> None:
    assert run_job(two_of_them).ok() == [[1.0, 2.0, 3.0]] * 2


def rule_elsewhere(job: Job, folders: list[str]) -> list[float]:
    sys.path.insert(0, folders[job.rank])
    kv = KeyValue(rule="published_rule:adding", publish=True)
    kv.init("w", np.zeros(3))
    kv.push("w", np.ones(3))
    counter = kv.publish()
    with reading(job) as reader:
        _, tensors = reader.pull(counter or 1)
        found: list[float] = tensors["w"].tolist()
    job.barrier()
    kv.close()
    return found


def test_each_worker_may_have_the_rule_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "published_rule.py").write_text(
            "def adding(value, gradient, state, options):\n    value += gradient\n\n\nadding.numpy = True\n"
        )
    assert run_job(rule_elsewhere, [str(folder) for folder in folders]).ok() == [[2.0] * 3] * 2


def disagree(job: Job) -> None:
    kv = KeyValue(publish=Every(buffers=2 + job.rank))
    kv.init("w", np.zeros(3))
    kv.publish()


def test_workers_have_to_agree() -> None:
    ended = run_job(disagree)
    assert ended.cause is not None
    assert "publish PublishSpec(buffers=3)" in ended.cause.what


def cut_of_keys(job: Job) -> None:
    kv = KeyValue()
    kv.init("w", np.zeros(3))
    if job.rank:
        kv._stores[0].announce(RequestOperation.CUT, b"")
    job.barrier()
    kv.push("w", np.zeros(3)).wait()


def cut_of_rows(job: Job) -> None:
    kv = KeyValue(rule="sum")
    kv.init_rows("t", (3, 2))
    kv._tables["t"].client.announce(RequestOperation.CUT, b"")
    kv.row_sparse_push("t", [0], np.zeros((1, 2), "f4")).wait()


def cut_of_worker_1(job: Job) -> None:
    kv = KeyValue(publish=True)
    kv.init("w", np.zeros(3))
    kv.publish()
    if job.rank:
        assert kv._versions._client is not None
        kv._versions._client.announce(RequestOperation.CUT, b"")
    job.barrier()
    kv.push("w", np.zeros(3)).wait()


def pull_of_versions(job: Job) -> None:
    kv = KeyValue(publish=True)
    kv.init("w", np.zeros(3))
    kv.publish()
    assert kv._versions._client is not None
    kv._versions._client.announce(RequestOperation.PULL, b"")
    kv.push("w", np.zeros(3)).wait()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (cut_of_keys, "sent a request that does not fit"),
        (cut_of_rows, "sent a request that does not fit"),
        (cut_of_worker_1, "worker 1 sent CUT, which is for worker 0"),
        (pull_of_versions, "sent PULL, which is for keys"),
    ],
)
def test_requests_that_no_worker_sends_end_the_job(what: Any, message: str) -> None:
    ended = run_job(what)
    assert ended.cause is not None
    assert message in ended.cause.what


# ---- what it costs


def steady(job: Job) -> list[tuple[int, int]]:
    kv = KeyValue(Sync(), "sum", publish=Every(when_held="wait"))
    kv.init(["w", "v"], [np.zeros(3000), np.zeros(5)])
    kv.init_rows("t", (ROWS, WIDTH))
    found = []
    for _ in range(6):
        kv.push(["w", "v"], [np.ones(3000), np.ones(5)])
        kv.row_sparse_push("t", [3], np.ones((1, WIDTH), "f4")).wait()
        before = counters.snapshot()
        kv.publish()
        used = counters.since(before)
        found.append((used.rpcs, used.registrations))
    kv.close()
    return found


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_only_the_first_makes_calls_and_registers_memory(device: str) -> None:
    for first, *others in run_job(steady, device=device, servers=2).ok():
        assert min(first) > 0
        assert others == [(0, 0)] * 5
