"""``python -m benchmarks tensorflow``: a short run with both runtimes, whose values are checked in there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.tensorflow import ADDITIONS, ARENA, MANY, OWN, find_python, transfers
from tensorwire.bench.compare import Samples, Workload, records
from tensorwire.bench.programs import OURS
from tensorwire.errors import MissingPackage
from tests.bench.running import BESIDE, bench
from tests.harness.sandbox import Sandbox


@pytest.mark.slow
def test_both_runtimes_compute_the_sum_of_all_additions(sandbox: Sandbox) -> None:
    try:
        python = find_python()
    except MissingPackage as error:
        pytest.skip(str(error))
    options = ("--device", "shm", "--sizes", "4KiB")
    _, made = bench(sandbox, *BESIDE, "tensorflow", *options, TENSORWIRE_TENSORFLOW_PYTHON=python)
    three, two = [OURS, ARENA, OWN], [OURS, ARENA]
    assert [record["peer"] for record in made] == [*three, *three, *two, *three]
    assert [record["mode"] for record in made[-3:]] == ["transfer-alone"] * 3


def test_the_transfer_alone_is_what_an_addition_leaves() -> None:
    shape = Workload("tensorflow", "shm", "w", 1 << 20, MANY, (), (OWN,))
    crossing = {OURS: 40e-6, ARENA: 12e-6, OWN: 270e-6}
    names = {name: name for name in crossing}
    made = records(shape, {name: Samples([s]) for name, s in crossing.items()}, names)
    alone = replace(shape, mode=ADDITIONS, name="a")
    two = {OURS: Samples([20e-6]), ARENA: Samples([10e-6])}
    made += records(alone, two, {name: name for name in two})
    left = {record.peer: record for record in transfers(made)}
    assert [left[name].seconds for name in names] == pytest.approx([20e-6, 2e-6, 250e-6])
    assert (left[ARENA].ratio, left[ARENA].met) == (pytest.approx(125.0), True)
    assert left[OURS].target is None
