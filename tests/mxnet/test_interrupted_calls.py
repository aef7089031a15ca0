"""MXNet calls, and steps of Trainer, that are interrupted anywhere: they are whole, or later ones are refused.

What is interrupted adds 1000, and what comes after it 1. Threads of ours send and receive, which nothing interrupts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire.errors import StepInterrupted
from tests.harness.interrupts import interrupt_at
from tests.harness.jobs import run_job
from tests.levels import long
from tests.mxnet.test_store import store_of

SIZES = (3 << 20, 5)  # elements of a key of three buckets, and of one that fits into a request with others
PARTS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)  # of a call's lines


class Subject:
    """A store with two keys, to which servers add what is pushed."""

    also = "none"

    def __init__(self, kind: str, call: str) -> None:
        self.mx, self.kv = store_of(kind)
        self.kv.set_optimizer(self.mx.optimizer.create("test"))
        self.call, self.keys, self.out = call, ["large", "small"], [self.mx.nd.zeros((n,)) for n in SIZES]
        self.kv.init(self.keys, self.out)

    def act(self, value: float) -> None:
        gradients = [self.mx.nd.full((n,), value) for n in SIZES]
        if self.call == "pushpull":
            self.kv.pushpull(self.keys, gradients, out=self.out)
        else:
            self.kv.push(self.keys, gradients)
            self.kv.pull(self.keys, out=self.out)

    def moved(self) -> list[float]:
        """The values of all elements, each once."""
        self.kv.pull(self.keys, out=self.out)
        return sorted({x for array in self.out for x in np.unique(array.asnumpy()).tolist()})


class Trained:
    """Three parameters of a Trainer, which updates them on the servers or here."""

    def __init__(self, kind: str, call: str) -> None:
        self.mx, self.kv = store_of(kind)
        self.also = self.mx.gluon.trainer.__file__
        self.params = self.mx.gluon.ParameterDict()
        for name, size in {"a": 5, "b": SIZES[0], "c": 7}.items():
            self.params.get(name, shape=(size,), init="zeros").initialize()
        on_servers = call == "on servers"
        self.trainer = self.mx.gluon.Trainer(self.params, "test", kvstore=self.kv, update_on_kvstore=on_servers)

    def act(self, value: float) -> None:
        with self.mx.autograd.record():
            loss = sum((p.data() * value).sum() for p in self.params.values())
        loss.backward()
        self.trainer.step(1)

    def moved(self) -> list[float]:
        return sorted({x for p in self.params.values() for x in np.unique(p.data().asnumpy()).tolist()})


class Moduled:
    """Two parameters of a Module."""

    def __init__(self, kind: str, call: str) -> None:
        self.mx, self.kv = mx, kv = store_of(kind)
        self.also = mx.model.__file__
        data, sizes = mx.sym.Variable("data"), {"a_weight": 5, "b_weight": SIZES[0]}
        scaled = [mx.sym.broadcast_mul(mx.sym.Variable(n, shape=(s,)), data).sum() for n, s in sizes.items()]
        self.module = mx.mod.Module(mx.sym.MakeLoss(scaled[0] + scaled[1]), label_names=None)
        self.module.bind([("data", (1,))])
        self.module.init_params(mx.init.Zero())
        self.module.init_optimizer(kv, "test")

    def act(self, value: float) -> None:
        self.module.forward_backward(self.mx.io.DataBatch([self.mx.nd.full((1,), value)]))
        self.module.update()

    def moved(self) -> list[float]:
        values, _ = self.module.get_params()
        return sorted({x for array in values.values() for x in np.unique(array.asnumpy()).tolist()})


KINDS = {"module": Moduled, "on servers": Trained, "in workers": Trained}


def outcome(subject: Any) -> Any:
    """What calls after the interrupted one lead to."""
    try:
        subject.act(1.0)
        return subject.moved()
    except StepInterrupted:
        for call in (lambda: subject.act(1.0), subject.kv.barrier):
            with pytest.raises(StepInterrupted, match="was interrupted by KeyboardInterrupt"):
                call()
        return "refused"


def interrupt(subject: Any, part: float) -> None:
    """Interrupts a call of 1000 when this part of its lines has run, after one of 0."""
    subject.act(0.0)
    lines = interrupt_at(lambda: subject.act(0.0), 0, also=subject.also)
    with pytest.raises(KeyboardInterrupt):
        interrupt_at(lambda: subject.act(1000.0), 1 + int(part * (lines - 1)), also=subject.also)


def interrupted(job: tw.Job, kind: str, call: str, log: str) -> None:
    for part in PARTS:
        subject = KINDS.get(call, Subject)(kind, call)
        interrupt(subject, part)
        with Path(log).open("a") as file:
            print(outcome(subject), file=file)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("dist_tensorwire_sync", "push and pull"),
        long(("dist_tensorwire_async", "push and pull")),
        ("dist_tensorwire_sync", "pushpull"),
        ("dist_tensorwire_sync", "on servers"),
        long(("dist_tensorwire_async", "on servers")),
        ("dist_tensorwire_sync", "in workers"),
        ("dist_tensorwire_sync", "module"),
    ],
)
def test_what_is_interrupted_is_whole_or_refused(kind: str, call: str, tmp_path: Path) -> None:
    """A worker that leaves in the middle of a call ends the job, and says so."""
    log = tmp_path / "log"
    ended = run_job(interrupted, kind, call, str(log), workers=1, servers=2)
    found = log.read_text().splitlines() if log.exists() else []
    assert len(found) == len(PARTS), ended.errors
    assert found[0] == "[1.0]"  # nothing had left
    assert set(found) <= {"[1.0]", "[1001.0]", "refused"}
    assert "refused" in found
    assert all("StepInterrupted" in each and "KeyboardInterrupt" in each for each in [f"{ended.cause}", *ended.errors])


def beside_another(job: tw.Job, part: float) -> list[float]:
    """Worker 0 is interrupted in its third step, and worker 1, whose gradients are zeros, takes four."""
    subject = Trained("dist_tensorwire_sync", "in workers")
    if job.rank:
        for _ in range(4):
            subject.act(0.0)
        return subject.moved()
    interrupt(subject, part)
    subject.act(1.0)
    return subject.moved()


@pytest.mark.parametrize("part", [0.5, long(0.9)])
def test_an_update_in_a_worker_that_is_interrupted_ends_the_job(part: float) -> None:
    """The others have made it."""
    ended = run_job(beside_another, part)
    assert "StepInterrupted" in str(ended.cause), ended.results


def scale_at_the_start(job: tw.Job) -> list[float]:
    subject, found = Trained("dist_tensorwire_sync", "on servers"), []
    trainer = subject.trainer
    init = trainer._init_kvstore

    def noted() -> None:
        found.append(trainer._optimizer.rescale_grad)
        init()

    trainer._init_kvstore = noted
    with subject.mx.autograd.record():
        loss = sum(p.data().sum() for p in subject.params.values())
    loss.backward()
    trainer.step(4)
    return found


def test_a_store_is_given_an_optimizer_that_knows_the_batch_size() -> None:
    """MXNet's own servers keep the scale that the optimizer has then."""
    assert run_job(scale_at_the_start, workers=1).ok() == [[0.25]]


def bad_arguments(job: tw.Job) -> list[float]:
    """What is refused before anything of it leaves keeps no other call from taking place."""
    subject = Subject("dist_tensorwire_sync", "pushpull")
    mx, kv = subject.mx, subject.kv
    good, bad = [mx.nd.ones((n,)) for n in SIZES], [mx.nd.ones((SIZES[0],)), mx.nd.ones((6,))]
    for call in (
        lambda: kv.push(subject.keys, bad),
        lambda: kv.pull(subject.keys, out=bad),
        lambda: kv.pushpull(subject.keys, good, out=bad),
        lambda: kv.push(["large", "none"], good),
    ):
        with pytest.raises(tw.errors.ArgumentError):
            call()
    subject.act(1.0)
    return subject.moved()


def test_a_call_with_a_value_that_does_not_fit_changes_no_key() -> None:
    (found,) = run_job(bad_arguments, workers=1, servers=2).ok()
    assert found == [1.0]
