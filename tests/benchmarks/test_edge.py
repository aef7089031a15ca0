"""``python -m benchmarks edge``: the programs of other libraries, which check values; no figure is judged."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.edges import OTHERS, Other, workloads
from benchmarks.libraries import Libraries
from tensorwire.bench.edges import KIB
from tensorwire.bench.limits import Limits
from tensorwire.bench.programs import Stage
from tensorwire.bench.show import Notes
from tests.harness.sandbox import nothing_kept

QUIET = Notes(lambda text: None, lambda text: None)


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.name)
def test_others_have_the_same_ends(other: Other) -> None:
    if "grpc" in other.name and importlib.util.find_spec("grpc") is None:
        pytest.skip("needs grpcio, of which this process is to have no thread")
    transfer, whole = workloads(["tcp"], 68 * KIB, Limits(QUIET), Libraries(None, QUIET), [other.peer.name])
    contenders = [next(c for c in workload.contenders if c.name == other.name) for workload in (transfer, whole)]
    assert len({c.commands for c in contenders}) == 1
    with nothing_kept(), Stage(contenders[0], (0, 1)) as stage:
        for warm, count, contender in ((1, 1, contenders[1]), (3, 4, contenders[0]), (2, 5, contenders[1])):
            assert stage.run(warm, count, contender.word)[-1]["seconds"] > 0
