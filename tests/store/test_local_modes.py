"""Workers that train by themselves: every value that a worker has equals a simulation in plain torch, bit for bit."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tensorwire.store import EASGD, SGD, DiLoCo, LocalSGD
from tensorwire.store.fates import Fate
from tensorwire.store.modes import Local
from tensorwire.store.sharding import StorePlan
from tensorwire.trace.push_fates import problems, read_fates
from tests.harness.jobs import for_each, run_job
from tests.levels import mostly_long
from tests.store.coded import SimulatedCode

BUCKET = 8 << 10
STEPS = (11, 14)
MODES = [
    EASGD(every=2),
    EASGD(every=3, alpha=0.3, delay=2),
    LocalSGD(every=3),
    DiLoCo(every=3),
    DiLoCo(every=2, outer=SGD(lr=0.5, momentum=0.0, nesterov=False), weight="tokens"),
    DiLoCo(every=6, fragments=3, delay=1, alpha=0.5),
    DiLoCo(every=4, fragments=2, quorum=1, grace=0.02),
    DiLoCo(every=3, quorum=1, delay=2, weight="tokens"),
    DiLoCo(every=4, fragments=2, quorum=1, delay=2, grace="auto"),
]
Values = dict[str, torch.Tensor]


def first_values() -> Values:
    generator = torch.Generator().manual_seed(3)
    shapes = {"wide": (70, 60), "bias": (7,), "empty": (0, 3), "half": (33,)}
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    values["half"] = values["half"].bfloat16()
    values["turned"] = torch.randn(6, 5, generator=generator).t()
    values["counts"] = torch.arange(5)
    return values


def named(values: Values, rank: int = 0) -> dict[str, torch.nn.Parameter]:
    """Worker 0's values count; those of the others are different before."""
    return {
        k: torch.nn.Parameter(v.clone(memory_format=torch.preserve_format) + rank, requires_grad=v.is_floating_point())
        for k, v in values.items()
    }


def gradients(params: dict[str, torch.nn.Parameter], rank: int, step: int) -> None:
    for p in params.values():
        if p.requires_grad:
            p.grad = (p.detach().float().sin() + 0.1 * rank + 0.01 * step).to(p.dtype)


def tokens(rank: int, step: int) -> int:
    return 3 + rank + step % 2


def train(job: tw.Job, mode: Local, compression: str | None = None) -> tuple[StorePlan, list[Values]]:
    params = named(first_values(), job.rank)
    chosen = {"mode": mode, "bucket_bytes": BUCKET, "compression": compression}
    store = tw.torch.StoreOptimizer(params.items(), torch.optim.AdamW, lr=0.05, **chosen)
    seen = []
    work = torch.randn(60, 60)
    for step in range(STEPS[job.rank % 2]):
        for _ in range(1 + 30 * job.rank):  # workers of unequal speed
            work = torch.tanh(work @ work)
        gradients(params, job.rank, step)
        if isinstance(mode, DiLoCo) and mode.weight == "tokens":
            store.count(tokens(job.rank, step))
        store.step()
        seen.append({k: p.detach().clone() for k, p in params.items()})
    store.wait()
    seen.append({k: p.detach().clone() for k, p in params.items()})
    assert store._local is not None
    return store._local.client.plan, seen


# ---- the simulation

Key = tuple[int, int]  # a server and a bucket there


class SimulatedBucket:
    """What a server does with one bucket."""

    def __init__(self, plan: StorePlan, bucket: Any, mode: Local, workers: int) -> None:
        self.mode, self.workers = mode, workers
        self.pieces = [(plan.tensors[p.tensor].name, p.start, p.stop) for p in bucket.pieces]
        first = first_values()
        self.shown = [first[n].reshape(-1)[a:b].clone() for n, a, b in self.pieces]
        self.masters = [v.float() if v.is_floating_point() else v for v in self.shown]
        if isinstance(mode, DiLoCo):
            self.trained = [torch.nn.Parameter(m) for m in self.masters if m.is_floating_point() and m.numel()]
            o = mode.outer
            self.outer = torch.optim.SGD(self.trained, lr=o.lr, momentum=o.momentum, nesterov=o.nesterov, fused=True)

    def merge(self, pushed: list[tuple[list[torch.Tensor], float]]) -> list[torch.Tensor]:
        """The answer to those who pushed."""
        if isinstance(self.mode, EASGD):
            alpha = 0.9 / self.workers if self.mode.alpha is None else self.mode.alpha
            moved = [
                (x - s) * (alpha if s.is_floating_point() else 0) for x, s in zip(pushed[0][0], self.shown, strict=True)
            ]
            for master, by in zip(self.masters, moved, strict=True):
                if master.is_floating_point():
                    master += by
            self._show()
            return moved
        means = []
        for i in range(len(self.pieces)):
            if all(weight == 1 for _, weight in pushed):
                total = pushed[0][0][i].float()
                for values, _ in pushed[1:]:
                    total = total + values[i]
            else:
                total = torch.zeros_like(pushed[0][0][i], dtype=torch.float32)
                for values, weight in pushed:
                    total.add_(values[i], alpha=weight)
            means.append(total / sum(weight for _, weight in pushed))
        if isinstance(self.mode, LocalSGD):
            self.masters = [m if v.is_floating_point() else v for m, v in zip(means, self.shown, strict=True)]
        else:
            found = [m for m, v in zip(means, self.shown, strict=True) if v.is_floating_point() and v.numel()]
            for p, mean in zip(self.trained, found, strict=True):
                p.grad = mean
            self.outer.step()
            trained = iter(self.trained)
            self.masters = [next(trained).detach() if v.is_floating_point() and v.numel() else v for v in self.shown]
        self._show()
        return [v.clone() for v in self.shown]

    def _show(self) -> None:
        self.shown = [m.to(v.dtype) for m, v in zip(self.masters, self.shown, strict=True)]


class Simulation:
    def __init__(
        self, plan: StorePlan, fates: list[Fate], mode: Local, seen: list[list[Values]], compression: str = ""
    ) -> None:
        self.codes: dict[tuple[Key, int], SimulatedCode] = {}  # by bucket and worker
        self.plan, self.mode, self.seen = plan, mode, seen
        self.keys = {(b.server, b.index): b for server in plan.buckets for b in server}
        self.buckets = {k: SimulatedBucket(plan, b, mode, len(seen)) for k, b in self.keys.items()}
        count = mode.fragments if isinstance(mode, DiLoCo) else 1
        numbers = plan.fragments(count)
        self.fragments = [[k for k, b in self.keys.items() if numbers[b.number] == f] for f in range(count)]
        self.sent: dict[tuple[Key, int, int], tuple[list[torch.Tensor], float]] = {}
        self.answers: dict[tuple[Key, int, int], list[torch.Tensor]] = {}
        self.versions = {k: self._versions(k, fates) for k in self.keys}
        quorum = mode.quorum if isinstance(mode, DiLoCo) else None
        # Who comes after its update is answered with the version before the one that has its push.
        self.late = 1 < (quorum or 0) < len(seen)
        self.updates = dict.fromkeys(self.keys, 0)  # that somebody has waited for
        self.rounds = {
            (k, w): sorted(r for each in v for n, r in each if n == w)
            for k, v in self.versions.items()
            for w in range(len(seen))
        }
        for key in self.keys if compression else ():
            for rank in range(len(seen)):
                code = SimulatedCode(compression, mode, self.buckets[key].shown)
                if code.smaller:
                    self.codes[key, rank] = code

    def _versions(self, key: Key, fates: list[Fate]) -> list[list[tuple[int, int]]]:
        """In order, who contributed to each version: worker and round."""
        mine = [f for f in fates if (f.shard, f.bucket) == key]
        return [
            sorted((f.worker, f.round) for f in mine if f.version == version)
            for version in range(1, max(f.version for f in mine) + 1)
        ]

    def run(self) -> None:
        running = {w: self.worker(w) for w in range(len(self.seen))}
        while running:
            for rank, program in list(running.items()):
                try:
                    while next(program):
                        pass
                except StopIteration:
                    del running[rank]
            assert self.close_rounds() or not running, "the log lacks a version"

    def close_rounds(self) -> bool:
        closed = False
        for key, versions in self.versions.items():
            while versions and all((key, *who) in self.sent for who in versions[0]):
                here = versions.pop(0)
                answer = self.buckets[key].merge([self.sent[key, w, r] for w, r in here])
                for w, r in here:
                    self.answers.setdefault((key, w, r), answer)
                self.updates[key] += any(self.rounds[key, w].index(r) == self.updates[key] for w, r in here)
                for w, r in versions[0] if versions and self.late else ():
                    if self.rounds[key, w].index(r) < self.updates[key]:
                        self.answers[key, w, r] = answer
                closed = True
        return closed

    def worker(self, rank: int) -> Generator[bool, None, None]:
        """Yields False while it waits for an answer."""
        params = named(first_values())
        last = {k: p.detach().clone() for k, p in params.items()}
        inner = torch.optim.AdamW(list(params.values()), lr=0.05)
        every, number = self.mode.every, 1
        delay = 0 if isinstance(self.mode, LocalSGD) else self.mode.delay
        on_the_way: list[tuple[int, int, int]] = []
        weights = [0.0] * len(self.fragments)
        for step in range(1, STEPS[rank % 2] + 1):
            gradients(params, rank, step - 1)
            inner.step()
            weights = [w + tokens(rank, step - 1) for w in weights]
            for again in (True, False):
                while on_the_way and on_the_way[0][2] <= step:
                    yield from self.mix(rank, on_the_way.pop(0), params, last)
                if again:
                    for f in range(len(self.fragments)):
                        if (step - (f + 1) * every // len(self.fragments)) % every == 0:
                            number += 1
                            weight, weights[f] = weights[f], 0.0
                            self.send(rank, f, number, params, last, weight)
                            on_the_way.append((f, number, step + delay))
            self.check(rank, step - 1, params)
        for exchange in on_the_way:
            yield from self.mix(rank, exchange, params, last)
        self.check(rank, STEPS[rank % 2], params)

    def check(self, rank: int, at: int, params: dict[str, torch.nn.Parameter]) -> None:
        for name, p in params.items():
            assert torch.equal(p.detach(), self.seen[rank][at][name]), (rank, at, name)

    def send(self, rank: int, fragment: int, number: int, params: Any, last: Values, weight: float) -> None:
        counted = isinstance(self.mode, DiLoCo) and self.mode.weight == "tokens"
        for key in self.fragments[fragment]:
            values = []
            for name, a, b in self.buckets[key].pieces:
                own = params[name].detach().reshape(-1)[a:b].clone()
                way = isinstance(self.mode, DiLoCo) and own.is_floating_point()
                values.append(last[name].reshape(-1)[a:b] - own if way else own)
            if (key, rank) in self.codes:
                known = [last[name].reshape(-1)[a:b] for name, a, b in self.buckets[key].pieces]
                values = self.codes[key, rank].push(values, known)
            self.sent[key, rank, number] = values, weight if counted else 1.0

    def mix(self, rank: int, exchange: Any, params: Any, last: Values) -> Generator[bool, None, None]:
        fragment, number, _ = exchange
        for key in self.fragments[fragment]:
            while (key, rank, number) not in self.answers:
                yield False
            if (key, rank) in self.codes:
                self.codes[key, rank].answered(self.answers[key, rank, number])
            for (name, a, b), answer in zip(self.buckets[key].pieces, self.answers[key, rank, number], strict=True):
                if not answer.is_floating_point():
                    continue
                flat = params[name].detach().reshape(-1).clone()
                if isinstance(self.mode, EASGD):
                    flat[a:b] -= answer
                elif isinstance(self.mode, DiLoCo) and self.mode.alpha:
                    flat[a:b] = (flat[a:b] * self.mode.alpha).add(answer, alpha=1 - self.mode.alpha)
                else:
                    flat[a:b] = answer
                params[name].data.copy_(flat.view(params[name].shape))
                known = last[name].reshape(-1).clone()
                known[a:b] = answer
                last[name] = known.view(last[name].shape)


def simulate(folder: Path, mode: Local, compression: str = "", **job: Any) -> tuple[Simulation, list[Fate]]:
    """Runs a job and its simulation."""
    found = run_job(train, mode, compression or None, fates=folder, **job).ok()
    lines = read_fates([folder])
    assert problems(lines) == []
    fates = [line for line in lines if isinstance(line, Fate)]
    simulation = Simulation(found[0][0], fates, mode, [seen for _, seen in found], compression)
    simulation.run()
    return simulation, fates


@pytest.mark.parametrize(
    ("mode", "device"),
    mostly_long([(m, d) for m in MODES for d in ("shm", "tcp")], [(m, "shm") for m in MODES] + [(MODES[5], "tcp")]),
    ids=repr,
)
def test_a_local_mode_equals_its_simulation(mode: Local, device: str, tmp_path: Path) -> None:
    simulate(tmp_path, mode, servers=2, device=device)


CODED = [
    (EASGD(every=3, alpha=0.3, delay=2), "topk(0.1)", "tcp"),
    (EASGD(every=2), "2bit(0.05)", "shm"),
    (LocalSGD(every=3), "topk(0.1)", "shm"),
    (LocalSGD(every=3), "int8(64)", "tcp"),
    (DiLoCo(every=6, fragments=3, delay=1, alpha=0.5), "topk(0.05)", "tcp"),
    (DiLoCo(every=3, quorum=1, delay=2, weight="tokens"), "2bit(0.02)", "shm"),
    (DiLoCo(every=4, fragments=2, quorum=1, grace=0.02), "bf16", "shm"),
    (LocalSGD(every=3), "2bit(0.02)", "tcp"),
    (EASGD(every=2), "int8", "tcp"),
    (DiLoCo(every=3), "fp16", "tcp"),
]


@pytest.mark.parametrize(("mode", "compression", "device"), mostly_long(CODED, CODED[:6]), ids=repr)
def test_a_coded_local_mode_equals_its_simulation(mode: Local, compression: str, device: str, tmp_path: Path) -> None:
    simulation, _ = simulate(tmp_path, mode, compression, servers=2, device=device)
    assert simulation.codes


@pytest.mark.parametrize(
    ("servers", "device", "grace", "compression"),
    [(1, "shm", 0, ""), (3, "shm", 0, ""), (3, "tcp", 0.01, ""), (2, "tcp", 0, "2bit(0.02)"), (1, "shm", 0, "bf16")],
)
def test_three_workers_of_which_two_are_enough(
    tmp_path: Path, servers: int, device: str, grace: float, compression: str
) -> None:
    mode = DiLoCo(every=2, quorum=2, grace=grace, outer=SGD(lr=1.0, momentum=0.5))
    _, fates = simulate(tmp_path, mode, compression, workers=3, servers=servers, device=device)
    for at in {(f.shard, f.bucket) for f in fates}:  # until workers finish, after five pushes
        waited = workers_of_updates([f for f in fates if (f.shard, f.bucket) == at])
        assert len(waited) >= 5
        assert all(len(workers) >= 2 for workers in waited[:5])


def workers_of_updates(fates: list[Fate]) -> list[set[int]]:
    """Whose pushes each update of a bucket has that workers waited for.

    These are not all of its versions: of a worker that is late twice in a row, the first push is merged by itself.
    """
    versions: dict[int, list[tuple[int, int]]] = {}  # workers, and which of their pushes it is
    pushes: Counter[int] = Counter()
    for f in sorted(fates, key=lambda f: (f.version, f.round)):
        pushes[f.worker] += 1
        versions.setdefault(f.version, []).append((f.worker, pushes[f.worker]))
    waited: list[set[int]] = []
    for _, merged in sorted(versions.items()):
        if any(number == len(waited) + 1 for _, number in merged):
            waited.append({worker for worker, _ in merged})
    return waited


# ---- values and state that users set


def write(job: tw.Job, mode: Local, steps: int) -> list[float]:
    p = torch.nn.Parameter(torch.zeros(3))
    store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, mode=mode)
    p.grad = torch.ones(3)
    for _ in range(steps):
        store.step()
    with torch.no_grad():
        p.fill_(5.0 + job.rank)
    store.write_parameters()
    p.grad = torch.zeros(3)
    store.step()
    return p.tolist()


def test_worker_0s_values_become_everybodys_and_replace_the_answer_that_is_on_its_way() -> None:
    modes = [(mode, 1) for mode in (EASGD(every=4), LocalSGD(every=4), DiLoCo(every=4, delay=1))]
    exchanging = [(mode, 2) for mode in (EASGD(every=2, delay=1), DiLoCo(every=2, delay=1))]
    assert run_job(for_each, write, modes + exchanging).ok() == [[[5.0] * 3] * 5] * 2


def write_and_go_on(job: tw.Job) -> list[int]:
    params = [torch.nn.Parameter(torch.zeros(1024)) for _ in range(60)]
    named = [(str(i), p) for i, p in enumerate(params)]
    mode = DiLoCo(every=2, delay=1, quorum=1)
    store = tw.torch.StoreOptimizer(named, torch.optim.SGD, lr=1.0, mode=mode, bucket_bytes=4 << 10)
    differ = []
    for number in range(1, 41):
        with torch.no_grad():
            for p in params:
                p.fill_(100.0 * number)
                p.grad = torch.ones(1024)
        store.write_parameters()
        store.step()
        differ += [number] * any(bool((p != 100.0 * number - 1).any()) for p in params)
        store.step()
    return differ


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["tcp"]))
def test_a_worker_that_goes_on_changes_nothing_that_slower_ones_get(device: str) -> None:
    assert run_job(write_and_go_on, device=device).ok() == [[], []]


def resume(job: tw.Job) -> bool:
    """Its own state is saved and loaded as a stock optimizer's, which has no entry for the store."""
    models = [torch.nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(8, 4)
    stores = [tw.torch.StoreOptimizer(m, torch.optim.AdamW, lr=0.1, mode=LocalSGD(every=100)) for m in models]
    for _ in range(3):
        models[0](x).square().sum().backward()
        stores[0].step()
        stores[0].zero_grad()
    models[1].load_state_dict(models[0].state_dict())
    state = stores[0].state_dict()
    torch.optim.AdamW(models[0].named_parameters()).load_state_dict(state)  # which leaves out what it does not know
    del state["store"]
    stores[1].load_state_dict(copy.deepcopy(state))  # torch shares its tensors
    stores[1].step()  # makes worker 0's values everybody's; without gradients, no step
    models[0].load_state_dict({k: job.broadcast(v) for k, v in models[0].state_dict().items()})
    stores[0].step()
    for model, store in zip(models, stores, strict=True):
        model(x).square().sum().backward()
        store.step()
    mine, other = (list(m.parameters()) for m in models)
    return all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_the_workers_own_state_is_saved_and_loaded() -> None:
    assert run_job(resume).ok() == [True, True]


def scheduled(job: tw.Job) -> list[float]:
    p = torch.nn.Parameter(torch.zeros(1))
    store = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, mode=LocalSGD(every=100))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(store, 0.5)
    values = []
    for _ in range(3):
        store.zero_grad()
        (-p).sum().backward()
        store.step()
        scheduler.step()
        values.append(p.item())
    return values


def test_a_scheduler_counts_for_the_workers_own_optimizer() -> None:
    assert run_job(scheduled).ok() == [[1.0, 1.5, 1.75]] * 2


# ---- what is refused


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (EASGD, {"every": 0}, "every must be a whole number of steps, 1 or more, not 0"),
        (EASGD, {"alpha": 0}, "alpha must be above 0 to 1, not 0"),
        (EASGD, {"alpha": 1.5}, "alpha must be above 0 to 1, not 1.5"),
        (EASGD, {"every": 3, "delay": 3}, "delay must be less than every=3, not 3"),
        (LocalSGD, {"every": 2.0}, "every must be a whole number of steps, 1 or more, not 2.0"),
        (DiLoCo, {"every": 4, "fragments": 5}, "fragments must be at most every=4, not 5"),
        (DiLoCo, {"every": 4, "delay": 5}, "delay must be less than every=4, not 5"),
        (DiLoCo, {"fragments": 0}, "fragments must be a whole number of fragments, 1 or more, not 0"),
        (DiLoCo, {"alpha": -0.1}, "alpha must be a number of at least 0, not -0.1"),
        (DiLoCo, {"quorum": 0}, "quorum must be a whole number of workers, 1 or more, not 0"),
        (DiLoCo, {"grace": 1.0}, "grace needs a quorum: without one a server waits for all workers"),
        (DiLoCo, {"quorum": 1, "grace": float("nan")}, "grace must be a number of at least 0, not nan"),
        (DiLoCo, {"quorum": 1, "grace": "soon"}, "grace must be 'auto' or a number of seconds, not 'soon'"),
        (DiLoCo, {"grace": "auto"}, "grace needs a quorum: without one a server waits for all workers"),
        (DiLoCo, {"weight": "size"}, "weight must be 'mean' or 'tokens', not 'size'"),
        (DiLoCo, {"outer": 0.7}, "outer must be tw.store.SGD(...), not 0.7"),
        (SGD, {"lr": -1}, "the outer lr must be a number of at least 0, not -1"),
        (SGD, {"momentum": 0}, "nesterov=True needs a momentum above 0: pass SGD(nesterov=False)"),
        (SGD, {"momentum": 2}, "the outer momentum must be from 0 to 1, not 2"),
    ],
)
def test_settings_out_of_range_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ArgumentError) as refused:
        kind(**options)
    assert str(refused.value) == message


def late(job: tw.Job, mode: Local) -> list[torch.Tensor]:
    """The second layer takes part from the second step on."""
    found = []
    for make in (torch.optim.SGD, partial(tw.torch.StoreOptimizer, mode=mode)):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        given: Any = (net.named_parameters(), torch.optim.SGD) if make is not torch.optim.SGD else (net.parameters(),)
        optimizer = make(*given, lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            net[: 1 + (step > 0)](torch.ones(2, 4)).sum().backward()
            optimizer.step()
        found.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    return found


def test_the_workers_optimizer_is_the_one_that_was_given() -> None:
    modes = [(EASGD(every=99),), (LocalSGD(every=99),), (DiLoCo(every=99),)]
    for stock, ours in run_job(for_each, late, modes, workers=1).ok()[0]:
        assert torch.equal(ours, stock)
