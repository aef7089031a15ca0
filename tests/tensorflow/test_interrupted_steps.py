"""Keras steps that are interrupted anywhere: all variables have them, or none, or the next step is refused.

A thread of ours exchanges, which nothing interrupts, and a step that is a function runs no Python at all.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire.errors import TensorwireError
from tests.harness.interrupts import interrupt_at
from tests.harness.jobs import for_each, run_job
from tests.levels import mostly_long
from tests.tensorflow.test_operators import load

ELEMENTS = 3000  # of each variable: three buckets
PARTS = (0.0, 0.4, 0.8, 0.95)  # of an eager step's lines
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "servers": {"on_servers": True},
    "async": {"mode": tw.store.Async()},
    "localsgd": {"mode": tw.store.LocalSGD(every=1)},
    "easgd": {"mode": tw.store.EASGD(every=1)},
}


class Subject:
    """Three variables, which a step moves by ``value``."""

    def __init__(self, kind: str, *, traced: bool = False) -> None:
        import keras

        self._tf, twt = load()
        self.errors = (TensorwireError, self._tf.errors.OpError)
        self._variables = [keras.Variable(np.zeros(ELEMENTS, np.float32)) for _ in range(3)]
        self._optimizer = twt.StoreOptimizer(keras.optimizers.SGD(1.0), bucket_bytes=4096, **MODES[kind])
        self._optimizer.build(self._variables)
        self._step = self._tf.function(self._apply) if traced else self._apply

    def act(self, value: float) -> None:
        self._step(self._tf.constant(-value))

    def _apply(self, value: Any) -> None:
        self._optimizer.apply([self._tf.fill([ELEMENTS], value) for _ in self._variables], self._variables)

    def moved(self) -> set[float]:
        return {float(each) for v in self._variables for each in np.unique(v.numpy())}


def interrupt(subject: Subject, part: float) -> None:
    """Interrupts a step of 1000 when this part of its lines has run."""
    lines = interrupt_at(lambda: subject.act(0.0), 0)
    with pytest.raises(KeyboardInterrupt):
        interrupt_at(lambda: subject.act(1000.0), 1 + int(part * (lines - 1)))


def alone(job: tw.Job, kind: str) -> list[str]:
    """How steps after interrupted ones ended, with one worker."""
    found = []
    for part in PARTS:
        subject = Subject(kind)
        subject.act(0.0)
        interrupt(subject, part)
        try:
            subject.act(1.0)
        except subject.errors as error:
            found.append(str(error))
        else:
            found.append(str(subject.moved()))
    return found


def test_an_interrupted_step_is_taken_back_or_refuses_the_next_one() -> None:
    """Its values are no others: either it had not begun, or what it changed is not what the servers know."""
    kinds = ["async", "localsgd", "easgd"]
    (several,) = run_job(for_each, alone, [(kind,) for kind in kinds], workers=1, servers=2).ok()
    for kind, found in zip(kinds, several, strict=True):
        refused = [each for each in found if "call optimizer.write_parameters() on every worker" in each]
        assert refused
        whole = [each for each in found if each not in refused]
        assert whole[0] == found[0]
        if kind == "easgd":  # which mixes what it has with what the servers have
            assert all("," not in each for each in whole)
        else:
            assert whole[0] == "{1.0}"
            assert set(whole) <= {"{1.0}", "{1001.0}"}


def beside_another(job: tw.Job, kind: str, part: float) -> list[float]:
    """Worker 0 is interrupted in its third step; the other's gradients are zeros, and it takes four."""
    subject = Subject(kind)
    subject.act(0.0)
    if job.rank:
        for _ in range(3):
            subject.act(0.0)
        return sorted(subject.moved())
    interrupt(subject, part)
    subject.act(1.0)
    if subject.moved() == {0.5}:  # that step had not begun
        subject.act(0.0)
    return sorted(subject.moved())


@pytest.mark.parametrize(
    ("kind", "part"), mostly_long([*product(["sync", "servers"], PARTS)], [("sync", 0.4), ("sync", 0.95)])
)
def test_an_interrupted_step_beside_another_worker(kind: str, part: float) -> None:
    ended = run_job(beside_another, kind, part, servers=2)
    if ended.cause is None:
        mine, others = ended.ok()
        assert mine == others
        assert mine in ([0.5], [500.5])
        return
    assert part > 0
    assert any(each in str(ended.cause) for each in ("worker 1 has other parameters", "a parameter was changed since"))


def in_a_function(job: tw.Job, kind: str) -> int:
    subject = Subject(kind, traced=True)
    subject.act(0.0)
    return interrupt_at(lambda: subject.act(1.0), 0)


def test_a_step_in_a_function_runs_no_line_that_could_be_interrupted() -> None:
    assert run_job(for_each, in_a_function, [(kind,) for kind in MODES], workers=1).ok() == [[0] * len(MODES)]
