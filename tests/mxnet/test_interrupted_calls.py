"""Calls of MXNet's store that are interrupted anywhere: keys have the whole call, or nothing, or others are refused.

What is interrupted pushes 1000, and what comes after it 1. Threads of ours send and receive, which nothing interrupts.
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
from tests.mxnet.test_store import store_of

SIZES = (3 << 20, 5)  # elements of a key of three buckets, and of one that fits into a request with others
PARTS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)  # of a call's lines


class Subject:
    """A store with two keys, to which servers add what is pushed."""

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


def outcome(subject: Subject) -> Any:
    """What calls after the interrupted one lead to."""
    try:
        subject.act(1.0)
        return subject.moved()
    except StepInterrupted:
        for call in (lambda: subject.act(1.0), subject.moved, subject.kv.barrier):
            with pytest.raises(StepInterrupted, match="was interrupted by KeyboardInterrupt"):
                call()
        return "refused"


def interrupted(job: tw.Job, kind: str, call: str, log: str) -> None:
    for part in PARTS:
        subject = Subject(kind, call)
        subject.act(0.0)
        lines = interrupt_at(lambda: subject.act(0.0), 0)  # noqa: B023
        with pytest.raises(KeyboardInterrupt):
            interrupt_at(lambda: subject.act(1000.0), 1 + int(part * (lines - 1)))  # noqa: B023
        with Path(log).open("a") as file:
            print(outcome(subject), file=file)


@pytest.mark.parametrize("call", ["push and pull", "pushpull"])
@pytest.mark.parametrize("kind", ["dist_tensorwire_sync", "dist_tensorwire_async"])
def test_what_is_interrupted_is_whole_or_refused(kind: str, call: str, tmp_path: Path) -> None:
    """A worker that leaves in the middle of a call ends the job, and says so."""
    log = tmp_path / "log"
    ended = run_job(interrupted, kind, call, str(log), workers=1, servers=2)
    found = log.read_text().splitlines()
    assert len(found) == len(PARTS), ended.errors
    assert found[0] == "[1.0]"  # nothing had left
    assert set(found) <= {"[1.0]", "[1001.0]", "refused"}
    assert "refused" in found
    assert all("StepInterrupted" in each and "KeyboardInterrupt" in each for each in [f"{ended.cause}", *ended.errors])


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
