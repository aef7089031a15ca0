"""TensorFlow's tensors in memory that other workers read: no copies, and values that stay."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import tensorwire as tw
from tensorwire.testing.patience import patient
from tests.harness.jobs import in_turn, run_job
from tests.tensorflow.test_distribute import check_bits, run


def use_arena() -> Any:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorwire.tensorflow.arena as arena

    return arena


def cross(job: tw.Job) -> list[Any]:
    """Tensors of many sizes, each of which the other worker changes and sends back."""
    arena = use_arena()
    import tensorflow as tf

    import tensorwire.tensorflow as twt
    from tensorwire.observe import counters

    @twt.distribute
    @tf.function(reduce_retracing=False)
    def there_and_back(x: Any) -> Any:
        with tf.device("/job:worker/task:0"):
            x = x + 1.0
        with tf.device("/job:worker/task:1"):
            x = x * 2.0
        with tf.device("/job:worker/task:0"):
            return tf.reduce_sum(x), tf.reduce_max(x), tf.reduce_min(x)

    wrong = []
    for size in (2, 1023, 1024, (1 << 16) - 1, 1 << 16, (1 << 20) + 1):
        for step in range(4):
            before = counters.copies
            results = [float(value) for value in there_and_back(tf.fill([size], float(step)))]
            job.barrier()
            copies = counters.copies - before
            value = 2.0 * (step + 1)
            if results[1:] != [value, value] or results[0] != pytest.approx(value * size, rel=1e-5):
                wrong.append((size, step, results))
            small = size * 4 < 256 << 10
            # The three results are copied, into slots here and out of them there.
            if step and copies != 3 + small:
                wrong.append((size, step, copies))
    assert arena.used() > 4 << 20
    return wrong


def change_a_variable(job: tw.Job) -> list[float]:
    """What was sent of a variable stays as it was, although the variable is changed in place before it is read."""
    use_arena()
    import tensorflow as tf

    import tensorwire.tensorflow as twt

    found = []
    if job.rank == 0:
        v = tf.Variable(tf.zeros([100_000]))

        @tf.function
        def send_and_change() -> None:
            twt.send(v.read_value(), "value", to=1)
            v.assign_add(tf.ones([100_000]))

        for _ in range(10):
            send_and_change()
        job.barrier()
    else:
        job.barrier()
        for _ in range(10):
            value = twt.recv("value", [100_000], source=0)
            found.append(float(tf.reduce_max(value)))
            found.append(float(tf.reduce_min(value)))
    return found


def test_what_crosses_is_not_copied_and_stays() -> None:
    (wrong, _), (other, found) = run_job(in_turn, cross, change_a_variable, servers=0, device="shm").ok()
    assert wrong == other == []
    assert found == [float(step) for step in range(10) for _ in range(2)]


def run_in_arena(job: tw.Job, number: int) -> Any:
    use_arena()
    return run(job, number, True)


def test_cut_functions_have_the_bits_of_one_process() -> None:
    check_bits([0, 1, 4, 6, 7], run_in_arena, device="shm")


def test_an_import_that_is_too_late_is_refused() -> None:
    script = "import tensorflow as tf; x = tf.ones([3]); import tensorwire.tensorflow.arena"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=patient(100.0), check=False
    )
    assert done.returncode == 1
    assert "TensorFlow has made tensors already" in done.stderr.splitlines()[-1]
