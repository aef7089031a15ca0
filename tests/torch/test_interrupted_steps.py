"""Steps and calls that are interrupted anywhere: they are completed, or the next call says that it cannot go on.

Every gradient of what is interrupted is 1000, and of what comes after it 1: all parameters move by 1, or all by 1001.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorwire as tw
from tensorwire.errors import GradientModified, StepInterrupted
from tensorwire.observe import failpoints
from tests.harness.interrupts import interrupt_at
from tests.harness.jobs import run_job
from tests.levels import long

ELEMENTS = 3000  # of each parameter: three buckets
REFUSALS = (StepInterrupted, GradientModified)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(3)])

    def forward(self, value: float) -> torch.Tensor:
        return sum((p.sum() * -value for p in self.dense), torch.zeros(()))


class Dense:
    """An optimizer of dense parameters, whose gradients come of backward."""

    def __init__(self, **options: Any) -> None:
        self.net = Net()
        self.overlap = options.get("overlap", False)
        self.optimizer = tw.torch.StoreOptimizer(self.net, torch.optim.SGD, lr=1.0, bucket_bytes=4096, **options)

    def act(self, value: float) -> None:
        self.optimizer.zero_grad()
        self.net(value).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def moved(self) -> set[float]:
        self.optimizer.wait()
        return {x for p in self.net.parameters() for x in p.detach().unique().tolist()}


class Sparse(Dense):
    """Rows travel of one parameter, in two requests."""

    def __init__(self) -> None:
        self.net = torch.nn.ModuleDict({"e": torch.nn.Embedding(600, 512, sparse=True), "d": Net()})  # type: ignore[assignment]
        torch.nn.init.zeros_(self.net["e"].weight)  # type: ignore[index]
        self.optimizer = tw.torch.StoreOptimizer(self.net, torch.optim.SGD, lr=1.0, bucket_bytes=4096, reduce="sum")

    def act(self, value: float) -> None:
        self.optimizer.zero_grad()
        rows = self.net["e"](torch.arange(600))  # type: ignore[index]
        (self.net["d"](value) - value * rows.sum()).backward()  # type: ignore[index]
        self.optimizer.step()


class Keys:
    """Keys of two stores, pushed and pulled in one call, or in two."""

    def __init__(self, together: bool, mode: Any) -> None:
        self.kv, self.together = tw.store.KeyValue(mode, "sum", bucket_bytes=4096), together
        self.keys = ["a", "b", "c"]
        self.kv.init("a", np.zeros(ELEMENTS, np.float32))
        self.kv.init(["b", "c"], [np.zeros(ELEMENTS, np.float32)] * 2)

    def act(self, value: float) -> None:
        values = [np.full(ELEMENTS, value, np.float32)] * 3
        if self.together:
            self.kv.pushpull(self.keys, values).wait()
        else:
            self.kv.push(self.keys, values)
            self.kv.pull(self.keys).wait()

    def moved(self) -> set[float]:
        return {float(x) for array in self.kv.pull(self.keys).wait() for x in np.unique(array)}


class Rows:
    """A table, whose rows take two requests."""

    def __init__(self) -> None:
        self.kv, self.all = tw.store.KeyValue(tw.store.Sync(), "sum"), np.arange(600)
        self.kv.init_rows("t", (600, 512))

    def act(self, value: float) -> None:
        self.kv.row_sparse_push("t", self.all, np.full((600, 512), value, np.float32))
        self.moved()

    def moved(self) -> set[float]:
        return {float(x) for x in np.unique(self.kv.row_sparse_pull("t", self.all).wait())}


KINDS: dict[str, Callable[[], Any]] = {
    "sync": Dense,
    "overlap": lambda: Dense(overlap=True),
    "norm": lambda: Dense(max_grad_norm=1e30),
    "async": lambda: Dense(mode=tw.store.Async()),
    "ssp": lambda: Dense(mode=tw.store.SSP(staleness=2)),
    "sparse": Sparse,
    "localsgd": lambda: Dense(mode=tw.store.LocalSGD(every=1)),
    "diloco": lambda: Dense(mode=tw.store.DiLoCo(every=1, outer=tw.store.SGD(lr=1.0, momentum=0.0, nesterov=False))),
    "easgd": lambda: Dense(mode=tw.store.EASGD(every=1)),
    "keys": lambda: Keys(False, tw.store.Sync()),
    "keys, async": lambda: Keys(False, tw.store.Async()),
    "pushpull": lambda: Keys(True, tw.store.Sync()),
    "rows": Rows,
}


def outcome(kind: str, subject: Any) -> str:
    """What the next call leads to."""
    try:
        subject.act(1.0)
        moved = subject.moved()
    except REFUSALS[: 2 if kind == "overlap" else 1]:
        with pytest.raises(REFUSALS):
            subject.act(1.0)
        return "refused"
    assert len(moved) == 1, f"{kind} mixed two calls: {sorted(moved)}"
    assert kind == "easgd" or moved in ({1.0}, {1001.0}), (kind, moved)
    return "completed"


def drawn_interrupts(job: tw.Job, seed: int, trials: int, log: str) -> None:
    draw = random.Random(seed)
    found, lines = [], dict[str, int]()
    for kind in islice(cycle(KINDS), trials):
        subject = KINDS[kind]()
        subject.act(0.0)
        if kind not in lines:
            lines[kind] = interrupt_at(lambda: subject.act(0.0), 0)  # noqa: B023
        line = draw.randint(1, lines[kind])
        try:
            interrupt_at(lambda: subject.act(1000.0), line)  # noqa: B023
        except KeyboardInterrupt:
            found.append(outcome(kind, subject))
    Path(log).write_text(" ".join(found))


@pytest.mark.parametrize(
    ("device", "seed", "trials"),
    [
        ("shm", 7, len(KINDS)),
        *(long((device, seed, 2 * len(KINDS))) for device in ("shm", "tcp") for seed in range(100, 104)),
    ],
)
def test_what_is_interrupted_goes_on_or_is_refused(device: str, seed: int, trials: int, tmp_path: Path) -> None:
    """How trials ended. Who leaves the job in the middle of a step ends it, and says so."""
    log = tmp_path / "log"
    ended = run_job(drawn_interrupts, seed, trials, str(log), workers=1, servers=2, device=device)
    found = log.read_text().split() if log.exists() else []
    assert len(found) > trials // 2, ended.errors
    assert seed != 7 or set(found) == {"refused", "completed"}
    told = [f"{ended.cause}", *ended.errors]
    assert all("StepInterrupted" in each and "KeyboardInterrupt" in each for each in told) == ("refused" in found), told


# Whose rounds have one push of every worker.
IN_STEP = ["sync", "overlap", "norm", "sparse", "keys", "pushpull", "rows"]


def beside_another(job: tw.Job, kind: str, seed: int) -> list[float]:
    """Worker 0 is interrupted in its third step, and worker 1, whose gradients are zeros, takes four."""
    subject = KINDS[kind]()
    subject.act(0.0)
    if job.rank == 1:
        for _ in range(3):
            subject.act(0.0)
        return sorted(subject.moved())
    line = random.Random(seed).randint(1, interrupt_at(lambda: subject.act(0.0), 0))
    try:
        interrupt_at(lambda: subject.act(1000.0), line)
    except KeyboardInterrupt:
        subject.act(1.0)
        if max(subject.moved()) <= 1:  # that step had not begun
            subject.act(0.0)
    else:
        subject.act(1.0)
    return sorted(subject.moved())


@pytest.mark.parametrize(
    ("kind", "device", "seed"),
    [
        *[("sync", "shm", 1), ("overlap", "tcp", 2), ("keys", "shm", 3)],
        *(long((k, d, seed)) for k in IN_STEP for d in ("shm", "tcp") for seed in range(10, 15)),
    ],
)
def test_what_is_interrupted_beside_another_worker(kind: str, device: str, seed: int) -> None:
    ended = run_job(beside_another, kind, seed, servers=2, device=device)
    if ended.cause is None:
        mine, others = ended.ok()
        assert mine == others
        assert mine in ([0.5], [1.0], [500.5], [1001.0])
        return
    refusals = "(StepInterrupted|GradientModified)" if kind == "overlap" else "StepInterrupted"
    assert re.match(refusals, ended.errors[0]), ended.errors
    assert re.match(f"JobEnded.* worker 0 raised {refusals}", ended.errors[1]), ended.errors


STATES = {"headed": "refused", "pushed": "refused", "answered_some": "completed"}


def at_failpoints(job: tw.Job) -> None:
    wrong = []
    for kind in (k for k in KINDS if "keys" not in k and k not in ("pushpull", "rows")):
        for state, expected in STATES.items():
            subject = KINDS[kind]()
            subject.act(0.0)
            if kind == "overlap" and state == "answered_some":  # nothing is waited for, but by the forward after it
                continue
            failpoints.fail_at("worker", 0, 2, state, MemoryError("no memory"))
            with pytest.raises(MemoryError):
                subject.act(1000.0)
            failpoints.listener = None
            if (found := outcome(kind, subject)) != expected:
                wrong.append(f"{kind}, {state}: {found}")
    assert not wrong, wrong


def test_every_state_of_a_step() -> None:
    ended = run_job(at_failpoints, workers=1, servers=2)
    assert ended.errors[0].startswith("StepInterrupted: step 2 was interrupted by MemoryError: no memory"), ended.errors


def leaves(job: tw.Job, how: str) -> list[float]:
    subject = Dense(overlap=how == "backward")
    subject.act(1.0)
    if job.rank == 0:
        if how == "backward":
            hook = subject.net.dense[1].register_hook(lambda _: sys.exit("no more"))
            with pytest.raises(SystemExit):
                subject.act(1000.0)
            hook.remove()
            return []
        failpoints.fail_at("worker", 0, 2, "pushed", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            subject.act(1000.0)
        return []  # its script ends in good order
    subject.act(1000.0)
    return sorted(subject.moved())


@pytest.mark.parametrize(
    ("how", "why"),
    [("step", "KeyboardInterrupt"), ("backward", "ArgumentError: the optimizer ended between backward() and step()")],
)
def test_who_leaves_in_the_middle_is_named_to_the_others(how: str, why: str) -> None:
    ended = run_job(leaves, how)
    told = f"worker 0 raised StepInterrupted: step 2 was interrupted by {why}"
    assert told in str(ended.cause)
    assert ended.errors[1].startswith("JobEnded")
    assert told in ended.errors[1]
