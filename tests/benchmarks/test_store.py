"""``python -m benchmarks store``: real stores of a small model, whose values are compared; no figure is judged."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.libraries import Libraries
from benchmarks.stores import workloads
from tensorwire.bench.programs import Stage
from tensorwire.bench.show import Notes
from tensorwire.bench.stores import StoreJob
from tensorwire.models import TINY
from tests.harness.sandbox import nothing_kept

QUIET = Notes(lambda text: None, lambda text: None)


@pytest.mark.slow
def test_the_same_values_as_grpc() -> None:
    if importlib.util.find_spec("grpc") is None:
        pytest.skip("needs grpcio, of which this process is to have no thread")
    job = StoreJob(TINY, workers=2, servers=2)
    (workload,) = [w for w in workloads(job, ["tcp"], Libraries(None, QUIET)) if w.mode == "step-copied"]
    values = {}
    for contender in workload.contenders:
        with nothing_kept(), Stage(contender, (0, 1)) as stage:
            for steps, word in ((1, "copied"), (3, "born")):
                answers = stage.run(1, steps, word)
            assert len({a["values"] for a in answers[2:]}) == 1  # one version everywhere
            values[contender.name] = answers[-1]["values"]
            if contender.name == "tensorwire":
                assert [(a["copies"], a["rpcs"], a["registrations"]) for a in answers] == [(0, 0, 0)] * 4
    assert set(values) == {"tensorwire", "grpc"}
    assert values["tensorwire"] == values["grpc"]
