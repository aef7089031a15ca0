"""Cut functions whose variables are on servers, which run the operators that read and change them."""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire import errors
from tensorwire.testing.patience import patient
from tests.harness.jobs import for_each, in_turn, run_job
from tests.levels import mostly_long
from tests.tensorflow.functions import FUNCTIONS
from tests.tensorflow.test_distribute import STEPS, flat, run
from tests.tensorflow.test_operators import load


def on_servers(job: tw.Job, number: int) -> tuple[list[Any], list[Any]]:
    """The results, and the variables as a function reads them; what was on worker 1 is on server 0."""
    tf, twt = load()
    function, variables, arguments = FUNCTIONS[number](tf, lambda rank: twt.server(0) if rank else twt.worker(0))
    called = twt.distribute(function)
    results = [called(*arguments(step)) for step in range(STEPS)]
    return flat(tf, results), flat(tf, twt.distribute(lambda: [v.read_value() for v in variables])())


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_functions_with_variables_on_a_server_have_the_bits_of_one_process(device: str) -> None:
    numbers = range(("shm", "tcp").index(device), len(FUNCTIONS), 2)
    (alone,) = run_job(for_each, run, [(number, False) for number in numbers], workers=1, servers=0).ok()
    for worker in run_job(for_each, on_servers, [(number,) for number in numbers], device=device).ok():
        for number, (results, values), (wanted, variables, _) in zip(numbers, worker, alone, strict=True):
            for found, other in zip(results + values, wanted + variables, strict=True):
                np.testing.assert_array_equal(found, other, FUNCTIONS[number].__name__)


def many(job: tw.Job) -> list[Any]:
    """Many variables of many kinds on two servers, and several functions that share them."""
    tf, twt = load()
    with twt.server(0):
        numbers = [tf.Variable(float(number)) for number in range(20)]
        text, truth, empty = tf.Variable("a"), tf.Variable(True), tf.Variable(tf.zeros((0, 3)))
    with twt.server(1):
        grows = tf.Variable([1.0], shape=tf.TensorShape(None))
        whole = tf.Variable([[1, 2], [3, 4]])

    @twt.distribute
    def change(by: Any) -> Any:
        for each in numbers:
            each.assign_add(by)
        text.assign(tf.strings.join([text, "b"]))
        truth.assign(tf.logical_not(truth))
        grows.assign(tf.concat([grows, [numbers[3] * 1.0]], axis=0))
        whole.assign_add(tf.transpose(whole))
        return by

    @twt.distribute
    def read() -> Any:
        return [tf.add_n(numbers), text.read_value(), truth.read_value(), empty.read_value(), grows.read_value(), whole]

    first = flat(tf, [read()])
    for step in range(3):
        change(tf.constant(float(step)))
    assert [float(each) for each in numbers] == [float(number) for number in range(20)]  # here they keep these
    return [np.asarray(each).tolist() for each in (*first, *flat(tf, [read()]))]


def arguments_on_a_server(job: tw.Job) -> list[float]:
    """A server is not called with the arguments: they cross, or what workers make of them."""
    tf, twt = load()
    small, large = tf.constant([1.0, 2.0]), tf.ones(5000)
    with twt.server(0):
        total = tf.Variable([0.0, 0.0])

    @twt.distribute
    def step(x: Any, y: Any) -> Any:
        with twt.server(0):
            total.assign_add(x * small)
            total.assign_add(tf.reduce_sum(y) * tf.ones(2))
            total.assign_add(tf.reduce_mean(large) * x)
        with twt.worker(1):
            there = tf.reduce_sum(x)
        return total.read_value(), there, x

    for number in range(2):
        found = step(tf.constant([1.0, 1.0 + number]), tf.ones(3))
    return [each.tolist() for each in flat(tf, [found])]


def beside_a_store(job: tw.Job) -> list[float]:
    """The job's servers have a store, too, made before or after."""
    tf, twt = load()
    import keras

    def trained() -> float:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(twt.StoreOptimizer(keras.optimizers.SGD(0.1), on_servers=True), "mse")
        model.fit(np.ones((4, 2)), np.zeros((4, 1)), batch_size=4, epochs=1, verbose=0)
        return float(model.weights[0][0, 0])

    first = trained()
    with twt.server(0):
        w = tf.Variable(1.0)
    step = twt.distribute(lambda: w.assign_add(1.0))
    return [first, float(step()), trained(), float(step())]


def steady_state(job: tw.Job) -> list[int]:
    tf, twt = load()
    from tensorwire.observe import counters

    with twt.server(0):
        w = tf.Variable(tf.ones(1000))

    @twt.distribute
    def step(x: Any) -> Any:
        with twt.worker(0):
            product = x * w
        w.assign_sub(product)
        return tf.reduce_sum(product)

    for _ in range(3):
        step(tf.ones(1000))
    job.barrier()
    before = counters.snapshot()
    for _ in range(3):
        step(tf.ones(1000))
    spent = counters.since(before)
    return [spent.rpcs, spent.registrations, spent.pickles]


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["shm"]))
def test_what_functions_do_with_variables_on_servers(device: str) -> None:
    before = [190.0, b"a", True, [], [1.0], [[1, 2], [3, 4]]]
    after = [250.0, b"abbb", False, [], [1.0, 3.0, 4.0, 6.0], [[8, 20], [20, 32]]]
    programs = steady_state, many, arguments_on_a_server, beside_a_store
    for spent, values, crossed, beside in run_job(in_turn, *programs, servers=2, device=device).ok():
        assert spent == [0, 0, 0]  # a call in the steady state asks nobody
        assert values == before + after
        assert crossed == [[10.0, 15.0], 3.0, [1.0, 2.0]]
        assert beside == pytest.approx([0.6, 2.0, 0.6, 3.0])


LIMIT = patient(4.0)


def short_limit() -> None:
    os.environ["TENSORWIRE_TIMEOUT"] = str(LIMIT)


def pause(job: tw.Job) -> float:
    """Between two calls more time passes than anything that is under way may take."""
    tf, twt = load()
    with twt.server(0):
        w = tf.Variable(1.0)
    step = twt.distribute(lambda: w.assign_add(1.0))
    step()
    threading.Event().wait(LIMIT + 1.0)
    return float(step())


def test_a_server_waits_for_calls_as_long_as_the_job_lives() -> None:
    assert run_job(pause, prepare=short_limit).ok() == [3.0] * 2


def fail_on_the_server(job: tw.Job) -> None:
    tf, twt = load()
    with twt.server(0):
        w = tf.Variable([1.0, 2.0])

    @twt.distribute
    def step(x: Any) -> Any:
        with twt.server(0):
            tf.debugging.assert_less(x, w, message="too much")
            return w + 1.0

    for number in range(3):
        step(tf.constant(float(number)))


def test_an_operator_that_fails_on_a_server_ends_the_job() -> None:
    ended = run_job(fail_on_the_server)
    assert str(ended.cause).startswith("server 0 raised InvalidArgumentError:")
    assert all("server 0 raised InvalidArgumentError" in error for error in ended.errors)


def note_pid(path: Path) -> None:
    path.write_text(str(os.getpid()))


def kill_the_server(job: tw.Job, pid: Path) -> str:
    tf, twt = load()
    with twt.server(0):
        w = tf.Variable(1.0)
    step = twt.distribute(lambda: w.assign_add(1.0))
    try:
        step()  # in which worker 1 may still be when worker 0 has its result
        if job.rank == 0:
            os.kill(int(pid.read_text()), signal.SIGKILL)
        while True:
            step()
    except errors.JobEnded as error:
        return str(error)


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["tcp"]))
def test_a_killed_server_ends_the_calls_of_the_workers(device: str, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    ended = run_job(kill_the_server, pid, device=device, prepare=functools.partial(note_pid, pid))
    assert [str(ended.cause)[:16], *(found[:16] for found in ended.results)] == ["server 0 is gone"] * 3
