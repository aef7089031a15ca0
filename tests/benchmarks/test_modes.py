"""``python -m benchmarks modes`` and small pushes beside gRPC: short runs, whose values and accuracy are checked."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.libraries import Libraries
from benchmarks.stores import pushes
from tensorwire.bench.programs import Stage
from tensorwire.bench.show import Notes
from tests.bench.running import BESIDE, bench
from tests.harness.sandbox import Sandbox, nothing_kept


@pytest.mark.slow
def test_a_training_has_its_accuracy_and_its_curve(sandbox: Sandbox) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("idx2numpy")
    picture = sandbox.folder / "modes.svg"
    options = ("--data", "digits", "--modes", "async", "--report", str(picture))
    _, (record,) = bench(sandbox, *BESIDE, "modes", *options)
    assert (record["peer"], record["mode"], record["target"]) == ("async", "convergence", "accuracy >= 90%")
    assert record["met"] == (record["details"]["accuracy"] >= 0.90)  # on a busy machine, too
    assert picture.read_text().count("<svg") == 1


@pytest.mark.slow
def test_every_small_push_arrives_at_grpc_too() -> None:
    if importlib.util.find_spec("grpc") is None:
        pytest.skip("needs grpcio, of which this process is to have no thread")
    for workload in pushes(["tcp"], Libraries(None, Notes(lambda text: None, lambda text: None))):
        assert "grpc" in [c.name for c in workload.contenders]
        for contender in workload.contenders:
            with nothing_kept(), Stage(contender, (0, 1)) as stage:
                for _ in range(2):  # values are checked in there
                    assert stage.run(1, 5, contender.word)[-1]["seconds"] > 0
