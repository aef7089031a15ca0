"""Batches of rows beside gRPC: a short run, whose values are checked."""

from __future__ import annotations

import pytest

from benchmarks.libraries import Libraries
from benchmarks.stores import rows
from tensorwire.bench.programs import Stage
from tensorwire.bench.show import Notes
from tests.harness.sandbox import nothing_kept

CORES = (0, 1)


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_rows_that_are_pushed_arrive_once(device: str) -> None:
    (workload,) = rows([device], Libraries(None, Notes(lambda text: None, lambda text: None)), quick=True)
    for contender in workload.contenders:
        with nothing_kept(), Stage(contender, CORES) as stage:
            *_, worker = stage.run(1, 3)  # values are checked in there
            assert worker["seconds"] > 0
            if contender.name == "tensorwire" and device == "tcp":
                assert 0.8 < worker["bytes_over_rows"] <= 1.1  # rows that are named twice travel once
