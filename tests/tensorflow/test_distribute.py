"""Functions that are cut over workers have the results and variables of one process, bit for bit."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire import errors
from tests.harness.jobs import for_each, in_turn, run_job
from tests.levels import long, mostly_long
from tests.tensorflow.functions import FUNCTIONS
from tests.tensorflow.test_operators import load

STEPS = 5


@contextlib.contextmanager
def anywhere(_: int) -> Iterator[None]:
    yield


def flat(tf: Any, results: list[Any]) -> list[Any]:
    return [each.numpy() for each in tf.nest.flatten(results)]


def run(job: tw.Job, number: int, distributed: bool) -> tuple[list[Any], list[Any], list[str]]:
    """The results, the variables, and the owner of each."""
    tf, twt = load()
    from tensorwire.tensorflow.placement import owner_of

    function, variables, arguments = FUNCTIONS[number](tf, twt.worker if distributed else anywhere)
    called = twt.distribute(function) if distributed else function
    results = [called(*arguments(step)) for step in range(STEPS)]
    return flat(tf, results), [v.numpy() for v in variables], [owner_of(v.handle) for v in variables]


def check_bits(numbers: Sequence[int], run_cut: Callable[..., Any], *arguments: Any, device: str) -> None:
    """``run_cut(job, number, *arguments)`` has the bits of one process, for the functions of these numbers."""
    (alone,) = run_job(for_each, run, [(number, False) for number in numbers], workers=1, servers=0).ok()
    cut = run_job(for_each, run_cut, [(number, *arguments) for number in numbers], servers=0, device=device).ok()
    for rank, results in enumerate(cut):
        for number, (found, mine, owners), (wanted, variables, _) in zip(numbers, results, alone, strict=True):
            for result, other in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(result, other, FUNCTIONS[number].__name__)
            for value, owner, other in zip(mine, owners, variables, strict=True):
                if owner == f"worker {rank}":
                    np.testing.assert_array_equal(value, other, FUNCTIONS[number].__name__)
            assert set(owners) == {"worker 0", "worker 1"}


@pytest.mark.parametrize(
    ("numbers", "device"),
    [(range(len(FUNCTIONS)), "shm"), ([0, 1], "tcp"), long((range(len(FUNCTIONS)), "tcp"))],
    ids=str,
)
def test_cut_functions_have_the_bits_of_one_process(numbers: Sequence[int], device: str) -> None:
    check_bits(numbers, run, True, device=device)


def captures(job: tw.Job) -> list[Any]:
    """Captured tensors, keyword arguments, nested arguments and results, and what nobody placed."""
    tf, twt = load()
    table, w = tf.constant([1.0, 2.0, 3.0]), tf.Variable(2.0)

    @twt.distribute
    def step(pair: Any, *, scale: Any) -> Any:
        """Has a name."""
        with tf.device("/job:worker/task:1"):
            product = pair["a"] * table * scale
        w.assign_add(tf.reduce_sum(product))
        return {"product": product, "pair": (pair["b"], w * 1.0), "nothing": None}

    found = [step({"a": tf.ones(3), "b": tf.zeros(2)}, scale=tf.constant(2.0)) for _ in range(2)][-1]
    assert step.__doc__ == "Has a name."
    assert found["nothing"] is None
    return [found["product"].numpy().tolist(), found["pair"][0].numpy().tolist(), float(found["pair"][1])]


def kept_results(job: tw.Job) -> list[float]:
    """Every result is kept, as users keep losses."""
    tf, twt = load()

    @twt.distribute
    def step(x: Any) -> Any:
        with tf.device("/job:worker/task:0"):
            here = x + 1.0
        with tf.device("/job:worker/task:1"):
            return here, here * 2.0

    kept = [step(tf.fill([100], float(number))) for number in range(8)]
    return [float(value[0]) for pair in kept for value in pair]


def refused(job: tw.Job) -> list[str]:
    tf, twt = load()

    with twt.worker(0):
        a = tf.Variable(1.0)
    with twt.worker(1):
        b = tf.Variable(1.0)
    with twt.worker(7):
        far = tf.Variable(1.0)

    def on(rank: Any) -> Any:
        return tf.device(f"/job:worker/task:{rank}")

    def loop_over_workers(x: Any) -> Any:
        for _ in tf.range(2):
            with on(0):
                x = x + 1.0
            with on(1):
                x = x * 2.0
        return x

    def loop_with_variables(x: Any) -> Any:
        for _ in tf.range(2):
            a.assign_add(x)
            b.assign_add(x)
        return x

    def resource(x: Any) -> Any:
        with on(0):
            stack = tf.raw_ops.StackV2(max_size=3, elem_type=tf.float32)
        with on(1):
            return tf.raw_ops.StackPushV2(handle=stack, elem=x)

    def nowhere(x: Any) -> Any:
        with on(2):
            return x * 2.0

    def other_job(x: Any) -> Any:
        with tf.device("/job:chief/task:0"):
            return x * 2.0

    def no_server(x: Any) -> Any:
        with tf.device("/job:ps/task:0"):
            return x * 2.0

    said = []
    functions = (loop_over_workers, loop_with_variables, resource, nowhere, other_job, no_server, lambda x: x * far)
    for function in functions:
        with pytest.raises(errors.TensorwireError) as raised:
            twt.distribute(tf.function(function))(tf.constant(1.0))
        said.append(str(raised.value))
    for call in (lambda: twt.distribute(1), lambda: twt.worker(-1), lambda: twt.server("0")):
        with pytest.raises(errors.ArgumentError) as raised:
            call()
        said.append(str(raised.value))
    return said


REFUSED = [
    "has operators of worker 0 and worker 1 in it",
    "takes variables of worker 0 and worker 1",
    "is a resource, which cannot leave its own",
    "is on worker 2, and the job has 2",
    "'/job:chief/task:0",
    "is on server 0, and the job has 0 of them: start more servers",
    "a variable is on worker 7",
    "takes a function",
    "rank must be 0 or more",
    "index must be 0 or more",
]


def test_arguments_and_results_of_cut_functions_and_what_cannot_be_cut() -> None:
    for captured, kept, said in run_job(in_turn, captures, kept_results, refused, servers=0).ok():
        assert captured == [[2.0, 4.0, 6.0], [0.0, 0.0], 26.0]
        assert kept == [value for number in range(8) for value in (number + 1.0, number * 2.0 + 2.0)]
        for each, part in zip(said, REFUSED, strict=True):
            assert part in each


def differ(job: tw.Job) -> None:
    tf, twt = load()

    @twt.distribute
    def step(x: Any) -> Any:
        with tf.device(f"/job:worker/task:{job.rank}"):
            return x * 2.0

    step(tf.ones(3))


def test_workers_that_run_different_functions_are_told() -> None:
    ended = run_job(differ, servers=0)
    assert ended.cause is not None
    assert "does not agree with" in str(ended.cause)


def steady_state(job: tw.Job) -> list[float]:
    """A ring of three workers; what a call costs once its edges are connected."""
    tf, twt = load()
    from tensorwire.observe import counters

    @twt.distribute
    def ring(x: Any) -> Any:
        for rank in (0, 1, 2, 0):
            with tf.device(f"/job:worker/task:{rank}"):
                x = x * 2.0
        return x

    results = [float(ring(tf.fill([1000], 1.0 + number))[0]) for number in range(3)]
    job.barrier()
    before = counters.snapshot()
    results += [float(ring(tf.fill([1000], 1.0 + number))[0]) for number in range(3, 6)]
    spent = counters.since(before)
    assert results == [16.0 * (1 + number) for number in range(6)]
    return [spent.rpcs, spent.registrations, spent.pickles]


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["shm"]))
def test_a_call_in_the_steady_state_asks_nobody(device: str) -> None:
    assert run_job(steady_state, workers=3, servers=0, device=device).ok() == [[0, 0, 0]] * 3


def alone(job: tw.Job) -> float:
    tf, twt = load()

    @twt.distribute
    def step(x: Any) -> Any:
        with tf.device("/job:worker/task:0"):
            return tf.reduce_sum(x)

    return float(step(tf.ones(3)))


def test_one_worker_needs_no_edges() -> None:
    assert run_job(alone, workers=1, servers=0).ok() == [3.0]


def die_in_a_call(job: tw.Job) -> str:
    tf, twt = load()

    @twt.distribute
    def step(x: Any) -> Any:
        with tf.device("/job:worker/task:1"):
            return x + 1.0

    for number in range(100):
        if job.rank == 1 and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            step(tf.ones(3))
        except errors.JobEnded as error:
            return str(error)
    return ""


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["tcp"]))
def test_a_killed_worker_ends_the_calls_of_the_others(device: str) -> None:
    ended = run_job(die_in_a_call, servers=0, device=device)
    assert str(ended.cause).startswith("worker 1 is gone")
    assert ended.results[0].startswith("worker 1 is gone")
