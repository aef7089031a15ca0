"""Every mode equals one process that takes the same pushes in the same order, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.observe import counters
from tensorwire.store import EASGD, SSP, Async, DiLoCo, LocalSGD, Sync
from tensorwire.store.fates import Fate
from tensorwire.store.modes import Mode, awaited
from tensorwire.store.sharding import StorePlan
from tensorwire.trace.push_fates import problems, read_fates, totals
from tests.harness.jobs import run_job
from tests.levels import mostly_long
from tests.store.coded import SimulatedCode

SHAPES = {"wide": (300, 40), "bias": (7,), "empty": (0, 3), "rare": (5,), "half": (33,)}
BUCKET = 16 << 10
STEPS = (6, 9)  # of each worker
MODES = [Sync(), Async(), Async(damping=0.5), SSP(staleness=0), SSP(staleness=2), SSP(staleness=1, damping=1.0)]
ADAM: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.01}
HEADS = 200  # bytes of the heads of a round, at most
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
NO_NUMBERS = (10**400, float("nan"), float("inf"), -1, True, "1", None)


def named(seed: int) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    values["half"] = values["half"].bfloat16()
    return {name: torch.nn.Parameter(value) for name, value in values.items()}


def train(job: tw.Job, mode: Mode, optimizer: str, options: dict[str, Any]) -> dict[str, Any]:
    """Gradients depend on the values that this worker has, so that replaying them tells what it had."""
    params = named(job.rank)
    first = {k: p.detach().clone() for k, p in named(0).items()}
    kind = getattr(torch.optim, optimizer)
    store = tw.torch.StoreOptimizer(params.items(), kind, mode=mode, bucket_bytes=BUCKET, **options)
    generator = torch.Generator().manual_seed(job.rank)
    gradients, seen, sent = [], [], []
    for step in range(STEPS[0] if isinstance(mode, Sync) else STEPS[job.rank % 2]):
        noise = torch.randn((60, 60), generator=generator)
        for _ in range(1 + 20 * job.rank):  # workers of unequal speed
            noise = torch.tanh(noise @ noise)
        for name, p in params.items():
            p.grad = (p.detach().float().sin() + noise.mean() + job.rank).to(p.dtype)
            if name == "rare" and (step + job.rank) % 2:
                p.grad = None
        gradients.append({k: None if p.grad is None else p.grad.clone() for k, p in params.items()})
        before = counters.snapshot()
        store.step()
        store.wait()
        sent.append(counters.since(before))
        seen.append({k: p.detach().clone() for k, p in params.items()})
    return {"plan": store._parts[0].plan, "first": first, "gradients": gradients, "seen": seen, "sent": sent}


class Replay:
    """One bucket in plain torch. ``at[v]``: what its pieces hold in version ``v``."""

    def __init__(self, plan: StorePlan, bucket: Any, first: dict[str, torch.Tensor], kind: str, options: Any) -> None:
        self.pieces = [(plan.tensors[p.tensor].name, p.start, p.stop) for p in bucket.pieces]
        self.shown = [first[n].flatten()[a:b].clone() for n, a, b in self.pieces]
        self.masters = [torch.nn.Parameter(value.float()) for value in self.shown if value.numel()]
        self.pieces = [piece for piece in self.pieces if piece[2] > piece[1]]
        self.shown = [value for value in self.shown if value.numel()]
        self.optimizer = getattr(torch.optim, kind)(self.masters, fused=True, **options)
        self.rate = options["lr"]
        self.at = {0: [v.clone() for v in self.shown]}

    def update(
        self, version: int, gradients: list[dict[str, torch.Tensor | None]], divisor: int, damping: float
    ) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate / damping
        alike: dict[bool, list[int]] = {}
        found = []
        for i, (name, start, stop) in enumerate(self.pieces):
            mine = [g.flatten()[start:stop].float() for g in (one[name] for one in gradients) if g is not None]
            total = None
            for one in mine:
                total = one.clone() if total is None else total + one
            found.append(None if total is None else total / divisor)
            if total is not None:
                alike.setdefault(bool(self.optimizer.state.get(self.masters[i])), []).append(i)
        for some in alike.values():  # fused SGD cannot take some with momentum and some without
            for i, master in enumerate(self.masters):
                master.grad = found[i] if i in some else None
            self.optimizer.step()
        self.at[version] = [m.detach().to(v.dtype).clone() for m, v in zip(self.masters, self.shown, strict=True)]

    def check(self, version: int, seen: dict[str, torch.Tensor]) -> None:
        for (name, start, stop), value in zip(self.pieces, self.at[version], strict=True):
            assert torch.equal(value, seen[name].flatten()[start:stop]), (version, name)


def replay(fates: list[Fate], found: list[dict[str, Any]], mode: Mode, kind: str, options: dict[str, Any]) -> int:
    """Checks every version that a worker had. Returns the largest staleness."""
    plan: StorePlan = found[0]["plan"]
    damping = 0.0 if isinstance(mode, Sync) else mode.damping
    stalest = 0
    for server, buckets in enumerate(plan.buckets):
        for bucket in buckets:
            mine = [f for f in fates if (f.shard, f.bucket) == (server, bucket.index)]
            one = Replay(plan, bucket, found[0]["first"], kind, options)
            has = dict.fromkeys(range(len(found)), 0)  # the version that each worker has
            for version in range(1, max(f.version for f in mine) + 1):
                events = sorted((f for f in mine if f.version == version), key=lambda f: f.worker)
                for f in events:
                    has[f.worker] = version - 1 - f.staleness
                    if f.round > 2:  # round 1 brought the first values
                        one.check(has[f.worker], found[f.worker]["seen"][f.round - 3])
                    stalest = max(stalest, f.staleness)
                if isinstance(mode, Sync):
                    assert [f.worker for f in events] == list(range(len(found)))
                    assert {f.weight for f in events} == {1 / len(found)}
                else:
                    assert [f.fate for f in events] == ["applied"]
                gradients = [found[f.worker]["gradients"][f.round - 2] for f in events]
                one.update(version, gradients, len(events), 1 + damping * events[0].staleness)
                if isinstance(mode, SSP):
                    check_bound(mine, events[0], mode.staleness, has[events[0].worker])
            if not isinstance(mode, SSP):  # whose last answers may hold later pushes as well
                for worker in range(len(found)):
                    last = max(f.version for f in mine if f.worker == worker)
                    one.check(last, found[worker]["seen"][-1])
    return stalest


def check_bound(mine: list[Fate], event: Fate, bound: int, has: int) -> None:
    """What the worker computed on held all pushes of the steps that it may not lack, of workers that go on."""
    step = event.round - 1
    for other in {f.worker for f in mine} - {event.worker}:
        for f in mine:
            if f.worker == other and f.round - 1 <= step - 1 - bound:
                assert f.version <= has, (event, f)


def sound(folder: Path) -> list[Fate]:
    """The fates of a job in which nothing is wrong with any."""
    lines = read_fates([folder])
    assert problems(lines) == []
    return [line for line in lines if isinstance(line, Fate)]


REPLAYED = [(device, mode, kind) for device in ("shm", "tcp") for mode in MODES for kind in ("AdamW", "SGD")]
FAST = [case for case in REPLAYED if case[0] == "shm"] + [("tcp", MODES[2], "AdamW")]


@pytest.mark.parametrize(("device", "mode", "kind"), mostly_long(REPLAYED, FAST), ids=repr)
def test_a_mode_equals_its_replay(mode: Mode, device: str, kind: str, tmp_path: Path) -> None:
    options = ADAM if kind == "AdamW" else SGD
    found = run_job(train, mode, kind, options, servers=2, device=device, fates=tmp_path).ok()
    stalest = replay(sound(tmp_path), found, mode, kind, options)
    if mode == Sync() or mode == SSP(staleness=0):
        assert stalest <= (0 if mode == Sync() else 1)
    pushes = sum(len(b) for b in found[0]["plan"].buckets)
    assert [t.produced for t in totals(read_fates([tmp_path]))] == [pushes * len(one["seen"]) for one in found]


# ---- what is coded

CODED = [
    (Sync(), "topk(0.1)", "shm"),
    (Sync(), "2bit(0.5)", "tcp"),
    (Sync(), "bf16", "shm"),
    (Async(damping=0.5), "int8(100)", "tcp"),
    (SSP(staleness=1), "topk(0.05)", "shm"),
    (SSP(staleness=1), "fp16", "tcp"),
]


def coded(one: dict[str, Any], name: str) -> tuple[list[dict[str, torch.Tensor | None]], int]:
    """One worker's gradients as servers see them, and how many bytes of them travel in a step."""
    plan: StorePlan = one["plan"]
    found = [{k: None if g is None else g.clone() for k, g in step.items()} for step in one["gradients"]]
    travel = 0
    for bucket in (bucket for buckets in plan.buckets for bucket in buckets):
        pieces = [(plan.tensors[p.tensor].name, p.start, p.stop) for p in bucket.pieces]
        code = SimulatedCode(name, Sync(), [one["first"][n].flatten()[a:b] for n, a, b in pieces])
        travel += code.nbytes if code.smaller else bucket.nbytes
        for step, changed in zip(one["gradients"], found, strict=True) if code.smaller else ():
            mine = [(step[n], a, b) for n, a, b in pieces]
            seen = code.push([None if g is None else g.flatten()[a:b] for g, a, b in mine], [])
            for (n, a, b), value in zip(pieces, seen, strict=True):
                target = changed[n]
                if target is not None and value is not None:
                    target.view(-1)[a:b] = value
    return found, travel


@pytest.mark.parametrize(("mode", "name", "device"), CODED, ids=repr)
def test_a_coded_mode_equals_its_replay(mode: Mode, name: str, device: str, tmp_path: Path) -> None:
    options = {**SGD, "compression": name}
    found = run_job(train, mode, "SGD", options, servers=2, device=device, fates=tmp_path).ok()
    for one in found:
        one["gradients"], travel = coded(one, name)
        whole = sum(b.nbytes for buckets in one["plan"].buckets for b in buckets)
        assert travel < whole
        for sent in one["sent"][2:]:  # before, what is present in a bucket changes
            assert travel <= (sent.mapped_bytes if device == "shm" else sent.bytes) <= travel + HEADS
    replay(sound(tmp_path), found, mode, "SGD", SGD)


@pytest.mark.parametrize("mode", [Async(), SSP(staleness=1)], ids=repr)
def test_four_workers_and_one_that_comes_alone(mode: Mode, tmp_path: Path) -> None:
    found = run_job(train, mode, "AdamW", ADAM, workers=4, fates=tmp_path).ok()
    replay(sound(tmp_path), found, mode, "AdamW", ADAM)


def push_late(job: tw.Job, rule: str, most: int) -> list[float]:
    """Worker 1 computes on the first version, and pushes when worker 0 has taken two steps and three steps."""
    p = torch.nn.Parameter(torch.zeros(2000))
    store = tw.torch.StoreOptimizer([("p", p)], rule, lr=1.0, mode=Async(max_staleness=most), bucket_bytes=4096)
    seen = []
    for step in range(2):
        p.grad = torch.full((2000,), 1.0 if job.rank == 0 else 100.0)
        for _ in range(2 - step) if job.rank == 0 else ():
            store.step()
        job.barrier()
        if job.rank == 1:
            store.step()
        seen.append(float(p[-1].detach()))
        job.barrier()
    return seen


@pytest.mark.parametrize(("rule", "sign"), [("SGD", -1), ("tensorwire.store.arithmetic:add", 1)])
def test_what_is_too_stale_is_discarded(rule: str, sign: int, tmp_path: Path) -> None:
    _, late = run_job(push_late, rule, 1, fates=tmp_path).ok()
    assert late == [sign * 2.0, sign * 103.0]  # of 2 other pushes it knew nothing, then of one
    fates = {(f.fate, f.reason, f.staleness, f.version) for f in sound(tmp_path) if f.worker == 1}
    assert fates == {("discarded", "too stale", 2, 0), ("applied", "", 1, 4)}
    assert [t.reasons for t in totals(read_fates([tmp_path]))] == [(), ("too stale",)]


# ---- values and state that users set


def write(job: tw.Job, mode: Mode) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Steps of unequal number, then new values by worker 0, and one more step."""
    params = named(job.rank)
    store = tw.torch.StoreOptimizer(params.items(), torch.optim.SGD, lr=0.5, mode=mode)
    for p in params.values():
        p.grad = torch.ones_like(p)
    for _ in range(1 + 2 * job.rank):
        store.step()
    with torch.no_grad():
        for p in params.values():
            p.fill_(job.rank + 1)
    store.write_parameters()
    job.barrier()
    for p in params.values():
        p.grad = torch.ones_like(p) if job.rank == 0 else None
    store.step()
    return params["wide"].detach().clone(), [v["step"] for v in store.state_dict()["state"].values() if "step" in v]


@pytest.mark.parametrize("mode", [Async(), SSP(staleness=5)], ids=repr)
def test_worker_0s_values_become_everybodys_in_the_next_step(mode: Mode) -> None:
    (mine, _), (other, _) = run_job(write, mode).ok()
    assert (mine == 0.5).all()  # 1 less the learning rate
    assert ((other == 0.5) | (other == 1.0)).all()  # before or after worker 0's step


def save_and_load(job: tw.Job) -> list[float]:
    params = named(0)
    store = tw.torch.StoreOptimizer(params.items(), torch.optim.AdamW, lr=0.1, mode=Async())
    for _ in range(2):
        for p in params.values():
            p.grad = torch.ones_like(p)
        store.step()
    job.barrier()
    state = store.state_dict()
    job.barrier()
    for values in state["state"].values():
        values["step"].fill_(100.0)
    store.load_state_dict(state)
    store.step()
    job.barrier()
    return sorted({float(v["step"]) for v in store.state_dict()["state"].values()})


def test_state_is_saved_and_loaded() -> None:
    for steps in run_job(save_and_load, workers=2).ok():
        assert steps == [102.0]


def finish_early(job: tw.Job) -> None:
    params = named(0)
    store = tw.torch.StoreOptimizer(params.items(), torch.optim.SGD, lr=0.1, mode=Async())
    if job.rank == 1:
        store.write_parameters()
        store.step()


def test_values_that_only_one_worker_sets_end_the_job() -> None:
    ended = run_job(finish_early)
    assert ended.cause is not None
    assert "all workers have to do together" in str(ended.cause)


# ---- workers that are absent for a while


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def go_on_while_one_is_stopped(job: tw.Job, mode: Mode) -> bool:
    """Worker 0 takes steps while the system lets worker 1 do nothing."""
    params = named(0)
    store = tw.torch.StoreOptimizer(params.items(), torch.optim.SGD, lr=0.1, mode=mode)
    other = job.broadcast(os.getpid(), 1)
    was_stopped = True
    for step in range(6):
        if job.rank == 1 and step == 1:
            os.kill(other, signal.SIGSTOP)
        while job.rank == 0 and step == 1 and not is_stopped(other):
            os.sched_yield()
        for p in params.values():
            p.grad = torch.ones_like(p)
        store.step()
        if job.rank == 0 and step == 4:
            was_stopped = is_stopped(other)
            os.kill(other, signal.SIGCONT)
    store.wait()
    return was_stopped


@pytest.mark.parametrize("mode", [Async(), DiLoCo(every=2, quorum=1, grace=0.01)], ids=repr)
def test_others_go_on_while_a_worker_is_stopped(mode: Mode, tmp_path: Path) -> None:
    assert run_job(go_on_while_one_is_stopped, mode, fates=tmp_path).ok() == [True, True]
    sound(tmp_path)
    rounds = 6 if isinstance(mode, Async) else 3
    assert [t.applied + t.merged for t in totals(read_fates([tmp_path]))] == [rounds, rounds]


# ---- what is refused


def refused(job: tw.Job) -> list[str]:
    found, params = [], named(0)

    def attempt(**options: Any) -> None:
        with pytest.raises(errors.TensorwireError) as raised:
            tw.torch.StoreOptimizer(params.items(), torch.optim.SGD, lr=0.1, **options).count(1)
        found.append(f"{type(raised.value).__name__}: {raised.value}")

    attempt(mode="async")
    for mode in (Async(), LocalSGD()):
        attempt(mode=mode, overlap=True)
        attempt(mode=mode, max_grad_norm=1.0)
    attempt(mode=SSP(), error_if_nonfinite=True)
    attempt(mode=DiLoCo(quorum=2))
    attempt(mode=DiLoCo(fragments=9))
    attempt(mode=Async())
    counting = tw.torch.StoreOptimizer(params.items(), torch.optim.SGD, lr=1.0, mode=DiLoCo(every=1, weight="tokens"))
    for number in (0, -1, 1e308, 1e-320, 10**400, float("nan"), True, "1", None):
        with pytest.raises(errors.ArgumentError, match="tokens must be a number from 1e-06 to 1e"):
            counting.count(number)
    return found


def test_what_a_mode_does_not_go_with_is_refused() -> None:
    said = run_job(refused, workers=1).ok()[0]
    for text, wanted in zip(
        said,
        (
            "ArgumentError: mode must be one of tw.store, such as tw.store.Async(), not 'async'",
            "Unsupported: overlap=True works with mode=Sync() alone so far",
            "Async(damping=0.0, max_staleness=None) does not take",
            "Unsupported: overlap=True works with mode=Sync() alone so far",
            "LocalSGD(every=10) does not take",
            "SSP(staleness=3, damping=0.0) does not take",
            "ArgumentError: quorum=2 needs as many workers, and this job has 1",
            "ArgumentError: 9 fragments need as many buckets, and there are 1",
            'ArgumentError: count() is for mode=DiLoCo(weight="tokens")',
        ),
        strict=True,
    ):
        assert wanted in text


def uncounted(job: tw.Job) -> None:
    p = torch.nn.Parameter(torch.zeros(1))
    tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, mode=DiLoCo(every=1, weight="tokens")).step()


def test_tokens_that_nobody_counted_are_asked_for() -> None:
    (said,) = run_job(uncounted, workers=1).errors
    assert 'weight="tokens" needs optimizer.count(tokens) before step(), in every exchange' in said


@pytest.mark.parametrize(
    ("make", "values", "wanted"),
    [
        (lambda v: SSP(staleness=v), (-1, 1.5, True, None, "2"), "staleness must be a whole number of steps, 0"),
        (lambda v: Async(max_staleness=v), (-1, 1.5, True, "2"), "max_staleness must be a whole number of pushes, 0"),
        (lambda v: Async(damping=v), NO_NUMBERS, "damping must be a number of at least 0"),
        (lambda v: SSP(damping=v), NO_NUMBERS, "damping must be a number of at least 0"),
        (lambda v: EASGD(alpha=v), [v for v in NO_NUMBERS if v is not None], "alpha must be"),
    ],
)
def test_settings_that_are_no_such_numbers_are_refused(make: Any, values: Any, wanted: str) -> None:
    for value in values:
        with pytest.raises(errors.ArgumentError, match=wanted):
            make(value)


def differ(job: tw.Job) -> None:
    mode = Async() if job.rank else Sync()
    tw.torch.StoreOptimizer(named(0).items(), torch.optim.SGD, lr=0.1, mode=mode)


def test_workers_with_different_modes_are_told_so() -> None:
    ended = run_job(differ)
    assert ended.cause is not None
    assert "Async(damping=0.0, max_staleness=None)" in str(ended.cause)
    assert "Sync()" in str(ended.cause)


@pytest.mark.parametrize(
    ("mode", "named"),
    [
        (Sync(), True),
        (LocalSGD(every=2), True),
        (DiLoCo(every=2), True),
        (DiLoCo(every=2, quorum=2), False),
        (Async(), False),
        (SSP(staleness=1), False),
        (EASGD(every=2), False),
    ],
)
def test_whom_rounds_wait_for(mode: Mode, named: bool) -> None:
    """Where a round has all workers, those that do not wait there can be named."""
    assert awaited(mode, 3) == ("" if named else "its servers or slower workers")
    assert awaited(mode, 1) == ("" if mode == Sync() else "its servers or slower workers")
