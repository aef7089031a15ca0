"""``python -m benchmarks tensorflow``: a short run with both runtimes, whose values are checked in there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.steps import check_losses as check_steps
from benchmarks.steps import mean
from benchmarks.tensorflow import ADDITIONS, ARENA, MANY, OWN, find_python, transfers
from benchmarks.tensorflow_strategies import MIRRORED, PARAMETER_SERVER
from benchmarks.tensorflow_training import COMPUTE, STEP, check_losses, parts_of
from tensorwire.bench.compare import Samples, Workload, records
from tensorwire.bench.programs import OURS, ProgramFailed
from tensorwire.errors import MissingPackage
from tests.bench.running import BESIDE, bench
from tests.harness.sandbox import Sandbox


@pytest.fixture
def python() -> str:
    """The Python that has TensorFlow; skips where there is none."""
    try:
        return find_python()
    except MissingPackage as error:
        pytest.skip(str(error))


@pytest.mark.long
def test_both_runtimes_compute_the_sum_of_all_additions(sandbox: Sandbox, python: str) -> None:
    options = ("--device", "shm", "--sizes", "4KiB")
    _, made = bench(sandbox, *BESIDE, "tensorflow", *options, TENSORWIRE_TENSORFLOW_PYTHON=python)
    three, two = [OURS, ARENA, OWN], [OURS, ARENA]
    assert [record["peer"] for record in made] == [*three, *three, *two, *three]
    assert [record["mode"] for record in made[-3:]] == ["transfer-alone"] * 3


def test_the_transfer_alone_is_what_an_addition_leaves() -> None:
    shape = Workload("tensorflow", "shm", "w", 1 << 20, MANY, (), (OWN,))
    crossing = {OURS: 40e-6, ARENA: 12e-6, OWN: 270e-6}
    made = records(shape, {name: Samples([s]) for name, s in crossing.items()})
    alone = replace(shape, mode=ADDITIONS, name="a")
    two = {OURS: Samples([20e-6]), ARENA: Samples([10e-6])}
    made += records(alone, two)
    left = {record.peer: record for record in transfers(made)}
    assert [left[name].seconds for name in crossing] == pytest.approx([20e-6, 2e-6, 250e-6])
    assert (left[ARENA].ratio, left[ARENA].met) == (pytest.approx(125.0), True)
    assert left[OURS].target is None


@pytest.mark.long
def test_both_runtimes_train_a_network_with_the_same_bits(sandbox: Sandbox, python: str) -> None:
    options = ("--part", "networks", "--workload", "gru", "--device", "tcp")
    _, made = bench(sandbox, *BESIDE, "tensorflow", *options, TENSORWIRE_TENSORFLOW_PYTHON=python)
    assert [(record["mode"], record["peer"]) for record in made] == [
        (f"{placement}-step", who) for placement in ("servers", "halves") for who in (OURS, OWN)
    ]
    for record in made:
        parts = record["details"]
        assert sum(parts[name] for name in ("compute", "exposed", "idle")) == pytest.approx(record["seconds"])


def test_the_parts_of_a_step_add_up() -> None:
    for timed, parts in (
        ((10.0, 6.0, 5.0), {"compute": 3.0, "exposed": 4.0, "idle": 3.0, "hidden": 1.0}),
        ((5.0, 6.0, 2.0), {"compute": 3.0, "exposed": 0.0, "idle": 2.0, "hidden": 2.0}),  # both compute at a time
        ((2.0, 6.0, 0.0), {"compute": 2.0, "exposed": 0.0, "idle": 0.0, "hidden": 0.0}),  # a run of chance
    ):
        found = parts_of(*timed)
        assert found == {**parts, "update": 0.0}
        assert found["compute"] + found["exposed"] + found["idle"] == timed[0]


@pytest.mark.long
def test_strategies_of_tensorflow_and_ours_train_a_network(sandbox: Sandbox, python: str) -> None:
    options = ("--part", "strategies", "--workload", "gru", "--device", "tcp")
    _, made = bench(sandbox, *BESIDE, "tensorflow", *options, TENSORWIRE_TENSORFLOW_PYTHON=python)
    assert [(record["mode"], record["peer"]) for record in made] == [
        ("sync-step", OURS),
        ("sync-step", MIRRORED),
        ("async-step", OURS),
        ("async-step", PARAMETER_SERVER),
    ]
    assert made[0]["details"]["loss"] == pytest.approx(made[1]["details"]["loss"], rel=1e-3)


def test_strategies_with_other_losses_end_the_benchmark() -> None:
    ours = mean([{"seconds": 1.0, "second": 0.5}, {"seconds": 1.0, "second": 0.7}, {"seconds": 0.0}], "second")
    check_steps("a", {"shm": ours, MIRRORED: 0.60001}, "second loss")
    with pytest.raises(ProgramFailed, match=r"a: the second loss is 0.6 with tensorwire, but 0.61 with mirrored"):
        check_steps("a", {"shm": ours, MIRRORED: 0.61}, "second loss")


def test_other_losses_than_those_of_one_process_and_of_grpc_end_the_benchmark() -> None:
    def told(first: float, steps: float, alone: float) -> None:
        answers = {STEP: {"loss": steps, "first": first}, COMPUTE: {"loss": alone}}
        own = {"loss": 0.7, "first": 1.0}
        check_losses("a", {what: {OURS: [[{}, answer]], OWN: [[{}, own]]} for what, answer in answers.items()})

    told(1.0, 0.5, 0.5)
    with pytest.raises(ProgramFailed, match=r"a: the losses are \[0.5\], in one process \[0.5000001\]"):
        told(1.0, 0.5, 0.5000001)
    with pytest.raises(ProgramFailed, match=r"a: the first loss is 1.1, over grpc 1.0"):
        told(1.1, 0.5, 0.5)
