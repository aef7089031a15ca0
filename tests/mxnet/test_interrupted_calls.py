"""Calls of MXNet's store that are interrupted anywhere: a key has a push with all of its elements, or not at all.

Threads of ours send and receive, which nothing interrupts; as with MXNet's own stores, a call for several keys may have
come to some of them.
"""

from __future__ import annotations

import numpy as np
import pytest

import tensorwire as tw
from tests.harness.interrupts import interrupt_at
from tests.harness.jobs import run_job
from tests.mxnet.test_store import store_of

ELEMENTS = 3 << 20  # of the first key: three buckets
PARTS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)  # of a call's lines


def interrupted(job: tw.Job, kind: str, call: str) -> list[tuple[str, list[list[float]]]]:
    """What was interrupted, and the values of each key after one more call."""
    mx, kv = store_of(kind)
    kv.set_optimizer(mx.optimizer.create("test"))  # adds what is pushed
    found = []

    def act(value: float) -> None:
        gradients = [mx.nd.full((n,), value) for n in sizes]
        if call == "pushpull":
            kv.pushpull(keys, gradients, out=out)
        else:
            kv.push(keys, gradients)
            kv.pull(keys, out=out)

    for trial, part in enumerate(PARTS):
        sizes = (ELEMENTS, 5)
        keys, out = [2 * trial, 2 * trial + 1], [mx.nd.zeros((n,)) for n in sizes]
        kv.init(keys, out)
        act(0.0)
        lines = interrupt_at(lambda: act(0.0), 0)
        how = "no"
        try:
            interrupt_at(lambda: act(1000.0), 1 + int(part * (lines - 1)))
        except KeyboardInterrupt:
            how = "yes"
        act(1.0)
        kv.pull(keys, out=out)
        found.append((how, [np.unique(each.asnumpy()).tolist() for each in out]))
    return found


@pytest.mark.parametrize("call", ["push and pull", "pushpull"])
@pytest.mark.parametrize("kind", ["dist_tensorwire_sync", "dist_tensorwire_async"])
def test_keys_have_whole_pushes(kind: str, call: str) -> None:
    (found,) = run_job(interrupted, kind, call, workers=1, servers=2).ok()
    assert {how for how, _ in found} == {"yes"}
    values = [each for _, keys in found for each in keys]
    assert all(each in ([1.0], [1001.0]) for each in values)
    assert [1.0] in values
    assert [1001.0] in values
