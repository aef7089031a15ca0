"""``python -m benchmarks edge``: the programs of other libraries, which check values; no figure is judged."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.edges import OTHERS, workloads
from benchmarks.libraries import Libraries
from tensorwire.bench.edges import KIB
from tensorwire.bench.limits import Limits
from tensorwire.bench.programs import Contender, Stage
from tensorwire.bench.show import Notes
from tests.harness.sandbox import nothing_kept
from tests.levels import long

QUIET = Notes(lambda text: None, lambda text: None)


def contenders(name: str, device: str, nbytes: int) -> list[Contender]:
    """A contender by its name, as the benchmark makes it: for the transfer alone, and for the whole."""
    made = workloads([device], nbytes, Limits(QUIET), Libraries(None, QUIET), ["grpc", "gloo"])
    return [next(c for c in workload.contenders if c.name == name) for workload in made]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device", "nbytes"),
    [
        long(("tensorwire", "tcp", 300 * KIB)),
        long(("tensorwire, bounded", "shm", 64)),
        ("tensorwire, dynamic", "tcp", 64),
        long(("tensorwire, dynamic", "shm", 300 * KIB)),
        *((other.name, "tcp", 68 * KIB) for other in OTHERS),
    ],
)
def test_every_edge_has_the_same_ends(name: str, device: str, nbytes: int) -> None:
    if "grpc" in name and importlib.util.find_spec("grpc") is None:
        pytest.skip("needs grpcio, of which this process is to have no thread")
    transfer, whole = contenders(name, device, nbytes)
    assert transfer.commands == whole.commands
    with nothing_kept(), Stage(transfer, (0, 1)) as stage:
        for warm, count, contender in ((1, 1, transfer), (2, 5, whole), (0, 4, transfer), (1, 2, whole)):
            answers = stage.run(warm, count, contender.word)  # values are checked in there
        assert answers[1]["seconds"] > 0 == answers[0]["seconds"]
        if name.startswith("tensorwire"):
            assert [(a["copies"], a["rpcs"], a["registrations"]) for a in answers] == [(0, 0, 0)] * 2
