"""Versions for readers: whole, in every mode, whatever readers do, and gone with the job."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire import Job
from tensorwire.errors import ArgumentError, ChecksumMismatch, VersionExpired, WaitTimeout
from tensorwire.observe import counters
from tensorwire.store import EASGD, SSP, Async, DiLoCo, Every, LocalSGD, Reader, Sync
from tensorwire.store.modes import Mode
from tensorwire.store.versions.cuts import Cut, CutReport
from tensorwire.store.versions.snapshots import Snapshots
from tensorwire.store.versions.version_files import BUFFERS, job_folder
from tests.harness.jobs import run_job
from tests.levels import mostly_long

SIZES = (3000, 5, 5000, 1)


@contextlib.contextmanager
def reading(job: Job, device: str = "auto", **options: Any) -> Iterator[Reader]:
    """A reader in this process; ``device``: ``auto`` maps files, ``tcp`` reads one-sidedly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORWIRE_DEVICE", device)
        reader = tw.store.connect(job.name, **options)
    with reader:
        yield reader


def parameters(value: float = 0.0) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"p{i}", torch.nn.Parameter(torch.full((size,), value))) for i, size in enumerate(SIZES)]


def counting(publish: Every | bool = True, mode: Mode | None = None, **options: Any) -> Any:
    """An optimizer of parameters whose elements all count the steps; and what steps it."""
    params = parameters()
    chosen = {"bucket_bytes": 4096, "mode": mode or Sync(), **options}
    optimizer = tw.torch.StoreOptimizer(params, torch.optim.SGD, lr=1.0, publish=publish, **chosen)

    def step() -> None:
        for _, p in params:
            p.grad = torch.full_like(p, -1.0)
        optimizer.step()

    return optimizer, step


def only(tensors: dict[str, torch.Tensor]) -> float:
    """The value that all elements of a version have."""
    values = {float(v) for tensor in tensors.values() for v in (tensor.min(), tensor.max())}
    assert len(values) == 1, values
    return values.pop()


# ---- what a version contains


def every_second(job: Job, device: str, overlap: bool) -> list[tuple[int, int, float]]:
    optimizer, step = counting(Every(2), overlap=overlap)
    assert optimizer.summary().endswith("; 2 snapshot buffers for readers take 62.5 KiB on the machine of server 0")
    seen = []
    with reading(job, device) as reader:
        for number in range(1, 8):
            step()
            counter = 1 + number // 2
            if job.rank == 0:
                version, tensors = reader.pull(counter)
                seen.append((version.counter, reader.wait(counter), only(tensors)))
            job.barrier()
    optimizer.close()
    return seen


@pytest.mark.parametrize(("device", "overlap"), [("auto", False), ("tcp", False), ("auto", True)])
def test_a_version_is_the_state_after_its_step(device: str, overlap: bool) -> None:
    (seen, _) = run_job(every_second, device, overlap, servers=2).ok()
    assert seen == [(c, c, 2.0 * (c - 1)) for c in (1, 2, 2, 3, 3, 4, 4)]


def second_apart() -> None:
    """The second server takes itself for one on another machine than the first."""
    from tensorwire.store.versions import shard_parts

    if os.environ["TENSORWIRE_INDEX"] == "1":
        shard_parts.why_not_shm = lambda *_: "another machine"


def from_apart(job: Job, mode: Mode) -> list[float]:
    """Each push adds 1 to every element; worker 0 checks all bytes of each version."""
    optimizer, step = counting(Every(1, when_held="wait"), mode)
    net = torch.nn.ParameterDict({name: torch.nn.Parameter(value) for name, value in parameters()})
    seen = []
    with reading(job) as reader:
        for _ in range(5):
            step()
            if job.rank == 0:
                with contextlib.closing(reader.stage(module=net)) as staged:
                    seen.append(only(staged.tensors) if isinstance(mode, Sync) else 0.0)
                    staged.commit(net)
            job.barrier()
    optimizer.close()
    return seen


@pytest.mark.parametrize("mode", [Sync(), Async()], ids=repr)
def test_servers_on_other_machines_send_their_parts(mode: Mode) -> None:
    seen, _ = run_job(from_apart, mode, servers=2, device="tcp", prepare=second_apart).ok()
    assert len(seen) == 5
    if isinstance(mode, Sync):
        assert seen == sorted(seen)
        assert seen[0] < seen[-1]


def overlapped(job: Job) -> list[bool]:
    """Worker 0 makes a version of a step for which worker 1 has not pushed yet."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.Linear(50, 10))
    optimizer = tw.torch.StoreOptimizer(net, torch.optim.SGD, lr=0.1, publish=True, overlap=True, bucket_bytes=4096)
    same = []
    with reading(job) as reader:
        for counter in (2, 3):
            if job.rank:
                job.barrier()
            net(torch.ones(2, 60)).sum().backward()
            optimizer.step()
            optimizer.publish()
            if not job.rank:
                job.barrier()
            optimizer.wait()
            _, got = reader.pull(counter)
            same += [torch.equal(got[name], value) for name, value in net.state_dict().items()]
            job.barrier()
    optimizer.close()
    return same


def test_a_version_waits_for_the_end_of_its_step() -> None:
    assert run_job(overlapped).ok() == [[True] * 8] * 2


def held_up_filler() -> None:
    """The thread that fills is held up while it takes a cut: until the next round has changed a bucket, or waits."""
    go, begin, take, before_write = threading.Event(), CutReport.begin, Snapshots.take, Snapshots.before_write
    writes = itertools.count(1)

    def fills() -> bool:
        return " snapshots " in threading.current_thread().name

    def taking(self: Snapshots, cut: Cut) -> None:
        if not fills():
            go.set()
        take(self, cut)

    def writing(self: Snapshots, bucket: int, round: int = 0) -> None:
        before_write(self, bucket, round)
        if next(writes) == 2:  # one has been changed
            go.set()

    def beginning(self: CutReport, cut: Cut) -> None:
        nonlocal writes
        begin(self, cut)
        if fills():
            go.clear()
            writes = itertools.count(1)
            go.wait()

    CutReport.begin, Snapshots.take, Snapshots.before_write = beginning, taking, writing  # type: ignore[method-assign]


def stepped_at_once(job: Job) -> list[float]:
    optimizer, step = counting(True)
    seen = []
    with reading(job) as reader:
        for number in range(1, 5):
            step()
            _, tensors = reader.pull(number)
            seen.append(only(tensors))
            if number < 4:
                optimizer.publish()
    optimizer.close()
    return seen


def test_a_round_that_begins_while_a_cut_is_taken_is_not_in_it() -> None:
    assert run_job(stepped_at_once, workers=1, servers=1, prepare=held_up_filler).ok() == [[0.0, 1.0, 2.0, 3.0]]


def manifests(job: Job, mode: Mode) -> list[tuple[set[float], int]]:
    """Each push adds 1 to every element. By bucket: the values in a version, and what its manifest says."""
    optimizer, step = counting(Every(None, when_held="wait"), mode)
    found = []
    with reading(job) as reader:
        for _ in range(6):
            step()
            counter = optimizer.publish()
            opened = reader._open(counter or 1, 60.0)
            assert opened.data is not None
            for places, updates in zip(reader._layout.buckets, opened.manifest.updates, strict=True):
                values = (
                    np.frombuffer(opened.data, np.float32, p.nbytes // 4, p.file - reader._layout.data) for p in places
                )
                found.append(({float(v) for each in values for v in each}, updates))
            opened.close()
        job.barrier()
    optimizer.close()
    return found


@pytest.mark.parametrize("mode", [Async(), SSP(staleness=2)], ids=repr)
def test_the_manifest_counts_the_updates_of_each_bucket(mode: Mode) -> None:
    first, *others = run_job(manifests, mode, servers=2, workers=3).ok()
    for found in (first, *others):
        assert all(values == {float(updates)} for values, updates in found)
    assert len({updates for _, updates in first}) >= 6, "each step of worker 0 is an update of every bucket"


def raced_by_updates(job: Job, versions: int) -> int:
    """Buckets change at any time, and each is copied at one moment: all elements of one have had as many updates."""
    p = torch.nn.Parameter(torch.zeros(1 << 21))
    options: dict[str, Any] = {"bucket_bytes": 4 << 20, "mode": Async()}
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, publish=Every(1), **options)
    p.grad = torch.full_like(p, -1.0)
    seen = set()
    with reading(job) as reader:
        while len(seen) < versions:
            optimizer.step()
            if job.rank == 0:
                opened = reader._open(1, 60.0)
                assert opened.data is not None
                for (place,), updates in zip(reader._layout.buckets, opened.manifest.updates, strict=True):
                    values = np.frombuffer(opened.data, np.float32, place.nbytes // 4, place.file - reader._layout.data)
                    assert values.min() == values.max() == updates
                seen.add(opened.manifest.counter)
                opened.close()
            else:
                seen.add(len(seen))
    job.barrier()
    optimizer.close()
    return len(seen)


def test_no_update_shows_in_the_middle_of_a_bucket() -> None:
    assert run_job(raced_by_updates, 40, workers=3).ok() == [40] * 3


def local(job: Job, mode: Mode) -> tuple[list[float], list[float]]:
    """What a version has, and what the workers have after an exchange of all of them."""
    optimizer, step = counting(True, mode)
    with reading(job) as reader:
        step()
        job.barrier()
        optimizer.publish()
        job.barrier()
        _, tensors = reader.pull(2)
        stored = optimizer.shared_state()
        same = [torch.equal(tensors[name], value) for name, value in stored.items()]
        job.barrier()
    optimizer.close()
    return same, sorted({float(v) for t in tensors.values() for v in t})


@pytest.mark.parametrize("mode", [LocalSGD(every=1), EASGD(every=1), DiLoCo(every=1)], ids=repr)
def test_a_version_of_workers_that_train_by_themselves_is_what_the_servers_have(mode: Mode) -> None:
    for same, values in run_job(local, mode, servers=2).ok():
        assert same == [True] * len(SIZES)
        assert values[0] > 0


def dtypes(job: Job) -> list[bool]:
    """Integer and frozen parameters, NaN, half precision, and one tensor under two names."""
    torch.manual_seed(job.rank)
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(30, 30), "b": torch.nn.Linear(30, 30)})
    net["b"].weight = net["a"].weight
    net["a"].bias.requires_grad_(False)
    net["c"] = torch.nn.Embedding(3, 5).to(torch.bfloat16)
    with torch.no_grad():
        net["c"].weight[1] = float("nan")
    net.register_parameter("whole", torch.nn.Parameter(torch.arange(9), requires_grad=False))
    optimizer = tw.torch.StoreOptimizer(net, torch.optim.SGD, lr=0.1, publish=Every(1))
    other = torch.nn.ModuleDict({"a": torch.nn.Linear(30, 30), "b": torch.nn.Linear(30, 30)})
    other["b"].weight = other["a"].weight
    other["c"] = torch.nn.Embedding(3, 5)
    other.register_parameter("whole", torch.nn.Parameter(torch.zeros(9, dtype=torch.int64), requires_grad=False))
    net["a"](torch.ones(2, 30)).sum().backward()
    optimizer.step()
    with reading(job) as reader:
        reader.load_into(other, 2)
    mine, theirs = net.state_dict(), other.state_dict()
    same = [torch.equal(theirs[k].nan_to_num(7.0), mine[k].to(theirs[k].dtype).nan_to_num(7.0)) for k in mine]
    optimizer.close()
    return [*same, mine.keys() == theirs.keys()]


def test_every_kind_of_parameter_reaches_a_module() -> None:
    for same in run_job(dtypes).ok():
        assert same == [True] * 7


# ---- never torn


def raced(job: Job, device: str, reads: int, sizes: tuple[int, ...]) -> tuple[int, int, int]:
    """Reads while the training goes at full speed. How many reads, of how many versions, and of how many steps."""
    params = [(f"p{i}", torch.nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes)]
    optimizer = tw.torch.StoreOptimizer(
        params, torch.optim.SGD, lr=1.0, publish=Every(1), bucket_bytes=16384, error_if_nonfinite=False
    )
    for _, p in params:
        p.grad = torch.full_like(p, -1.0)
    over, failed, steps = threading.Event(), [], 0
    seen: list[int] = []

    def read() -> None:
        try:
            with reading(job, device) as reader:
                into = {name: torch.empty_like(p) for name, p in params}
                for _ in range(reads):
                    version, tensors = reader.pull(seen[-1] if seen else 1, into=into)
                    assert only(tensors) == version.step, "a mixed version"
                    seen.append(version.counter)
        except BaseException as error:
            failed.append(error)
        over.set()

    thread = threading.Thread(target=read)
    if job.rank == 0:
        thread.start()
    while not job.broadcast(float(over.is_set())):
        optimizer.step()
        steps += 1
    if failed:
        raise failed[0]
    optimizer.close()
    assert seen == sorted(seen)
    return len(seen), len(set(seen)), steps


RACES = [("auto", 2000, (9000, 5, 7000)), ("tcp", 1500, (9000, 5, 7000)), *[("auto", 100_000, (9000, 5, 7000))] * 5]
RACES += [("tcp", 50_000, (9000, 5, 7000)), ("auto", 20_000, (250_000, 5)), ("tcp", 5000, (250_000, 5))]


@pytest.mark.parametrize(("device", "reads", "sizes"), mostly_long(RACES, RACES[:2]))
def test_no_read_is_torn_while_the_training_goes_on(device: str, reads: int, sizes: tuple[int, ...]) -> None:
    (read, versions, steps), _ = run_job(raced, device, reads, sizes, servers=2).ok()
    assert read == reads
    assert versions > reads / 500
    assert steps >= versions - 1


# ---- readers that keep versions


def held(job: Job, when_held: str) -> tuple[list[int | None], float, float]:
    """A reader keeps version 2 as the training goes on."""
    optimizer, step = counting(Every(None, when_held=when_held))
    made, kept, newest = [], 0.0, 0.0
    if job.rank == 0:
        with reading(job) as reader:
            step()
            made.append(optimizer.publish())
            staged = reader.stage(2)
            step()
            made.append(optimizer.publish())
            step()
            if when_held == "wait":  # somebody else lets go of it, when worker 0 waits
                waited = optimizer._client.wait_on
                optimizer._client.wait_on = lambda *a: (staged.close() if len(made) == 2 else None, waited(*a))
            kept = only(staged.tensors)
            made.append(optimizer.publish())
            assert when_held == "wait" or only(staged.tensors) == kept
            staged.close()
            reader.wait(made[-1] or 3)
            _, tensors = reader.pull(made[-1] or 3)
            newest = only(tensors)
            step()
            made.append(optimizer.publish() or optimizer.publish())
            job.barrier()
    else:
        for _ in range(4):
            step()
        job.barrier()
    optimizer.close()
    return made, kept, newest


def test_where_readers_hold_all_buffers_a_version_is_left_out() -> None:
    (made, kept, newest), _ = run_job(held, "skip").ok()
    assert made[:3] == [2, 3, None]
    assert (kept, newest) == (1.0, 2.0)


def test_where_readers_hold_all_buffers_the_training_may_wait() -> None:
    (made, kept, newest), _ = run_job(held, "wait").ok()
    assert made == [2, 3, 4, 5]
    assert (kept, newest) == (1.0, 3.0)


def stopped(job: Job) -> tuple[str, float]:
    """A reader that falls silent in the middle of a read over the network, and what it gets then."""
    optimizer, step = counting(Every(1, when_held="wait"), bucket_bytes=4096)
    if job.rank:
        for _ in range(4):
            step()
        optimizer.close()
        return "", 0.0
    with reading(job, "tcp") as reader:
        opened = reader._open(1, 60.0)
        for _ in range(4):
            step()  # the last one waits for a buffer, until the lease is revoked
        with pytest.raises(VersionExpired) as raised:
            opened.read([])
        opened.close()
        _, tensors = reader.pull(4)
    optimizer.close()
    return str(raised.value), only(tensors)


def leases_count(seconds: float) -> None:
    """For so long without a sign of life."""
    from tensorwire.store.versions.readers import Readers

    begin = Readers.__init__

    def begun(readers: Readers, *arguments: Any) -> None:
        begin(readers, *arguments)
        readers._silent = seconds

    Readers.__init__ = begun  # type: ignore[method-assign]


def test_a_silent_lease_is_revoked() -> None:
    (why, value), _ = run_job(stopped, prepare=partial(leases_count, 0.05)).ok()
    assert "version 1 was taken back, because this reader was silent for too long" in why
    assert value >= 3.0


def dropped(job: Job, device: str) -> list[int | None]:
    """A reader that is gone holds nothing."""
    optimizer, step = counting(Every(1, when_held="wait"))
    if job.rank == 0:
        with reading(job, device) as reader:
            reader._open(1, 60.0)  # and it is never closed
    for _ in range(4):
        step()
    job.barrier()
    optimizer.close()
    return []


@pytest.mark.parametrize("device", ["auto", "tcp"])
def test_a_reader_that_is_gone_holds_nothing(device: str) -> None:
    run_job(dropped, device, prepare=partial(leases_count, 1e9)).ok()


# ---- what readers ask for


def parts(job: Job, device: str) -> tuple[list[bool], list[int]]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 40))
    optimizer = tw.torch.StoreOptimizer(net, torch.optim.SGD, lr=0.1, publish=True, bucket_bytes=4096)
    want = {name: value.clone() for name, value in net.state_dict().items()}
    same, sizes = [], []
    with reading(job, device) as reader:
        slices = {"0.weight": [slice(5, 9)], "1.weight": [slice(1, None), slice(-7, -1)]}
        into = {"0.weight": torch.empty(4, 20), "1.weight": torch.empty(39, 6)}
        for _ in range(3):
            before = counters.bytes if device == "tcp" else counters.copied_bytes
            _, got = reader.pull(1, slices=slices, into=into)
            sizes.append((counters.bytes if device == "tcp" else counters.copied_bytes) - before)
            if device == "tcp":
                sizes[-1] -= reader._layout.data  # the header
            same.append(got["0.weight"] is into["0.weight"])
            same += [torch.equal(got[name], want[name][tuple(part)]) for name, part in slices.items()]
        registered = counters.registrations
        _, got = reader.pull(1, slices=slices, into=into)
        sizes.append(counters.registrations - registered)
        _, got = reader.pull(1, names=["1.bias"])
        same += [set(got) == {"1.bias"}, torch.equal(got["1.bias"], want["1.bias"])]
        with pytest.raises(ArgumentError, match=r"into\['0\.weight'\] is torch.float32 \[4, 20\], and"):
            reader.pull(1, names=["0.weight"], into=into)
        with pytest.raises(ArgumentError, match="no tensor 'x'"):
            reader.pull(1, names=["x"])
    job.barrier()
    optimizer.close()
    return same, sizes


@pytest.mark.parametrize("device", ["auto", "tcp"])
def test_readers_get_what_they_ask_for_and_read_no_more(device: str) -> None:
    for same, sizes in run_job(parts, device).ok():
        assert all(same)
        payload = 4 * (4 * 20 + 39 * 6)
        if device == "tcp":
            payload += 5 * 8 * 3 + 2 * 8 * 2  # looks at the board; the lease of 2 buffers, twice
        assert sizes == [payload] * 3 + [0]


def repeated(job: Job, device: str) -> list[int]:
    """How much memory a reader keeps registered after each of its pulls."""
    optimizer, _ = counting(True)
    kept = []
    with reading(job, device) as reader:
        for _ in range(4):
            _, got = reader.pull(1)
            assert only(got) == 0.0
            kept.append(len(reader._source._rooms))  # type: ignore[attr-defined]
    job.barrier()
    optimizer.close()
    return kept


def test_pulls_into_new_memory_keep_none_of_it() -> None:
    assert run_job(repeated, "tcp").ok() == [[0] * 4] * 2


def asked(job: Job) -> tuple[int, int]:
    optimizer, step = counting(True)
    step()
    newest = 0
    with reading(job) as reader:
        before = reader.newest()
        job.barrier()
        if job.rank == 0:
            reader.ask()
        seen = job.broadcast(0.0)
        while not seen:  # the word is on its way
            step()
            seen = job.broadcast(float(reader.newest() > before))
        for _ in range(3):
            step()
        job.barrier()
        newest = reader.newest()
    optimizer.close()
    return before, newest


def test_a_reader_that_asks_gets_one_version() -> None:
    for before, newest in run_job(asked).ok():
        assert (before, newest) == (1, 2)


# ---- staging


def staged(job: Job, device: str) -> list[str]:
    torch.manual_seed(3)
    net = torch.nn.Linear(40, 50)
    optimizer = tw.torch.StoreOptimizer(net, torch.optim.SGD, lr=0.1, publish=True, bucket_bytes=4096)
    other, seen = torch.nn.Linear(40, 50), []
    initial = other.weight.clone()
    with reading(job, device) as reader:
        first = reader.stage(1, module=other)
        assert reader.version is None
        assert torch.equal(other.weight, initial), "nothing changes before the commit"
        assert first.commit(other) == first.commit(other) == reader.version
        assert torch.equal(other.weight, net.weight)
        assert set(reader.seconds) == {"pause", "read", "verify", "convert"}
        again = reader.stage(1)
        whole = torch.nn.Module()
        whole.register_buffer("weight", torch.zeros(50, 40, dtype=torch.int64))
        whole.register_buffer("bias", torch.zeros(50))
        for wrong in (torch.nn.Linear(40, 51), torch.nn.Linear(40, 50, bias=False), whole):
            before = {name: value.clone() for name, value in wrong.state_dict().items()}
            with pytest.raises(ArgumentError) as raised:
                again.commit(wrong)
            seen.append(str(raised.value))
            assert all(torch.equal(before[name], value) for name, value in wrong.state_dict().items())
        seen_before = torch.nn.Linear(40, 50)
        again.commit(seen_before)
        alive = weakref.ref(seen_before)
        del seen_before
        assert alive() is not None, "another module could have its id, and be taken for it"
        half = torch.nn.Linear(40, 50).to(torch.bfloat16)
        again.commit(half)
        assert torch.equal(half.weight, net.weight.bfloat16())
        with pytest.raises(ArgumentError, match="is not staged any more"):
            first.commit(other)
        with pytest.raises(WaitTimeout, match=r"version 2 was not published within 0\.01 s: 1 is the newest"):
            reader.stage(timeout=0.01)
    with pytest.raises(ArgumentError, match="this reader was closed"):
        reader.newest()
    job.barrier()
    optimizer.close()
    return seen


@pytest.mark.parametrize("device", ["auto", "tcp"])
def test_a_module_changes_when_a_version_is_committed_and_not_before(device: str) -> None:
    for shape, names, kinds in run_job(staged, device).ok():
        assert shape == "'weight' is [51, 40] in the module, [50, 40] in the version"
        assert names.startswith("the version is not one of this module: it has 'bias': load what it lacks")
        assert kinds == "'weight' is torch.int64 in the module, and torch.float32 in the version"


def damaged(job: Job, device: str) -> str:
    net = torch.nn.Linear(40, 50)
    optimizer = tw.torch.StoreOptimizer(net, torch.optim.SGD, lr=0.1, publish=True, bucket_bytes=4096)
    other = torch.nn.Linear(40, 50)
    before, why = other.weight.clone(), ""
    if job.rank == 0:
        with reading(job, device) as reader:
            reader.wait()
            (file,) = (job_folder(job.name) / BUFFERS).glob("*-0")
            with file.open("r+b") as opened:  # as root only: the file is read-only
                opened.seek(-1, 2)
                opened.write(b"\xff")
            with pytest.raises(ChecksumMismatch) as raised:
                reader.load_into(other)
            why = str(raised.value)
            assert reader.version is None
            assert torch.equal(other.weight, before)
    job.barrier()
    optimizer.close()
    return why


@pytest.mark.parametrize("device", ["auto", "tcp"])
def test_a_wrong_byte_is_found_and_its_bucket_named(device: str) -> None:
    why, _ = run_job(damaged, device).ok()
    assert "bucket 2 of version 0.1." in why
    assert "begins with 'bias', has another checksum than was published" in why


def followed(job: Job) -> list[tuple[int, int]]:
    optimizer, step = counting(Every(1, when_held="wait"))
    other = torch.nn.ParameterDict(dict(parameters()))
    seen: list[tuple[int, int]] = []

    def follow() -> None:
        with reading(job) as reader:
            seen.extend((version.step, int(only(dict(other)))) for version in reader.follow(other))

    thread = threading.Thread(target=follow)
    thread.start()
    for _ in range(50):
        step()
    while not seen or seen[-1][0] < 50:
        pass
    job.barrier()
    assert optimizer.param_groups
    return [*seen, (thread.is_alive(), 0)]


def test_a_module_follows_the_training() -> None:
    for seen in run_job(followed).ok():
        *versions, (alive, _) = seen
        assert alive
        assert all(step == value for step, value in versions)
        assert versions == sorted(set(versions))
        assert versions[-1] == (50, 50)


# ---- what it costs


def counted(job: Job) -> list[tuple[int, int, int]]:
    """What this worker does for ten versions: RPCs, registrations, and messages beyond those of the steps."""
    found = []
    for publish in (None, 1):
        optimizer, step = counting(Every(publish, when_held="wait"))
        for _ in range(3):
            step()
        before = counters.snapshot()
        for _ in range(10):
            step()
        after = counters.snapshot()
        found.append([getattr(after, n) - getattr(before, n) for n in ("rpcs", "registrations", "messages")])
        optimizer.close()
    return found


def test_a_version_costs_worker_0_one_message_to_each_shard_and_others_nothing() -> None:
    first, second = run_job(counted, servers=2).ok()
    (rpcs, registrations, messages), published = first
    assert (rpcs, registrations) == (0, 0)
    assert published == [0, 0, messages + 10 * 2]
    assert second[0] == second[1]
