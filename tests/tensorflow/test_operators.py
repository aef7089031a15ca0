"""Send and receive: every dtype, either end first, loops, what is kept, and how they end."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire import errors
from tensorwire.testing.patience import patient
from tests.harness.jobs import for_each, in_turn, run_job
from tests.levels import mostly_long


def load() -> tuple[Any, Any]:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    import tensorwire.tensorflow as twt

    tf.config.threading.set_intra_op_parallelism_threads(1)
    return tf, twt


def load_with_a_limit(job: tw.Job) -> tuple[Any, Any]:
    """The same; from then on sends, receives and connections may take two seconds, in which nothing is compiled."""
    from tensorwire.tensorflow.operator_edges import load_operators

    found = load()
    load_operators()
    job.barrier()
    os.environ["TENSORWIRE_TIMEOUT"] = str(patient(2.0))
    return found


SHAPES = [(), (0, 3), (1,), (7, 5), (300, 1000)]
DTYPES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 complex128"


def drawn(tf: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    numbers = np.random.default_rng(len(shape)).integers(0, 2 if dtype == "bool" else 100, shape)
    return tf.cast(tf.constant(numbers), dtype)


def every_tensor(job: tw.Job, varies: bool, traced: bool) -> list[str]:
    """Permuted, sliced and broadcast operands, and what TensorFlow encodes; where shapes vary, one edge for all."""
    tf, twt = load()
    base = tf.reshape(tf.range(2 * 300 * 5), [2, 300, 5])
    tensors = [drawn(tf, dtype, shape) for dtype in DTYPES.split() for shape in SHAPES]
    tensors += [tf.transpose(base), base[1], base[:, 7:9], base[0, 1:, 2], tf.broadcast_to(base[:, :1], [2, 300, 5])]
    tensors += [tf.reshape(base, [1] * 7 + [6, 500]), tf.bitcast(tf.constant([1, 2], tf.uint8), tf.quint8)]
    wrong = []
    for number, wanted in enumerate(tensors):
        key = wanted.dtype.name if varies else f"{wanted.dtype.name} {number}"
        shape = tf.TensorShape(None) if varies else wanted.shape

        def cross(tensor: Any, key: str = key, shape: Any = shape) -> Any:
            if job.rank == 0:
                return twt.send(tensor, key, to=1, shape=shape)
            return twt.recv(key, shape, tensor.dtype, source=0)

        found = (tf.function(cross) if traced else cross)(wanted)
        if job.rank == 1 and not (found.dtype == wanted.dtype and np.array_equal(found.numpy(), wanted.numpy())):
            wrong.append(f"{key} {wanted.shape} {found.shape}")
    return wrong


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_every_dtype_and_shape_arrives(device: str) -> None:
    cases = [(varies, traced) for varies, traced in ((True, False), (False, True), (False, False))]
    assert (
        run_job(for_each, every_tensor, cases[: 3 if device == "shm" else 1], servers=0, device=device).ok()
        == [[[]] * (3 if device == "shm" else 1)] * 2
    )


MANY = 40  # more than a key keeps until they have left


def either_first(job: tw.Job, receiver_first: bool) -> list[float]:
    """The two ends, one of which begins after the other has, several steps ahead."""
    _, twt = load()
    key = f"receiver first: {receiver_first}"
    twt.send(0.0, key, to=1) if job.rank == 0 else twt.recv(key, [], source=0)
    first = job.rank == (1 if receiver_first else 0)
    found: list[float] = []

    def run() -> None:
        for step in range(MANY):
            if job.rank == 0:
                twt.send(float(step), key, to=1)
            else:
                found.append(float(twt.recv(key, [], source=0)))

    thread = threading.Thread(target=run)
    if first:
        thread.start()
    job.barrier()
    if not first:
        thread.start()
    thread.join()
    job.barrier()
    return found


def loops(job: tw.Job) -> list[Any]:
    """In a loop and a branch, with steps of our own, which come in another order at either end."""
    tf, twt = load()

    @tf.function
    def run() -> Any:
        total = tf.zeros([4])
        for number in tf.range(1, 7):
            if job.rank == 0:
                twt.send(tf.fill([4], tf.cast(7 - number, tf.float32)), "loop", to=1, step=7 - number)
            else:
                got = twt.recv("loop", [4], source=0, step=number)
                total = total * 10 + got
        if tf.reduce_sum(total) >= 0:
            if job.rank == 0:
                twt.send(total, "branch", to=1)
            else:
                total += twt.recv("branch", [4], source=0)
        else:
            twt.send(total, "never", to=1 - job.rank)
        return total

    return [float(value) for value in run()]


# ---- what is kept


def keep(job: tw.Job) -> list[Any]:
    """Results of many calls are kept, in every way that a function has; and what is only used is not copied."""
    tf, twt = load()
    from tensorwire.observe import counters

    kept = tf.Variable(tf.zeros([4, 2]))
    names = ("returned", "reshaped", "assigned", "listed", "used")

    @tf.function
    def run(x: Any) -> Any:
        if job.rank == 0:
            for number, name in enumerate(names):
                twt.send(x + float(number), name, to=1)
            return x
        got = {name: twt.recv(name, [4, 2], source=0) for name in names}
        kept.assign(got["assigned"])
        listed = tf.TensorArray(tf.float32, 1).write(0, got["listed"]).stack()
        return got["returned"], tf.reshape(got["reshaped"], [-1])[2:6], listed, tf.reduce_sum(got["used"] * 2.0)

    results = [run(tf.ones([4, 2]) * call) for call in range(6)]
    job.barrier()
    copies = counters.copies
    if job.rank == 0:
        return [copies]
    return [copies, kept.numpy().tolist(), [[float(tf.reduce_max(each)) for each in result] for result in results]]


# ---- errors


def die(job: tw.Job, key: str, told: bool) -> str:
    """Worker 1 dies; what the other one's receive then raises is returned, or left to end its script."""
    tf, twt = load()
    twt.send(1.0, "ready", to=1 - job.rank)
    twt.recv("ready", [], source=1 - job.rank)
    job.barrier()
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        twt.recv(key, [], source=1)
    except tf.errors.OpError as error:
        if not told:
            raise
        job._worker.member.client.ended.wait()  # who leaves before gets `JobEnded` while it does
        return f"{type(error).__name__}: {error.message}"
    return ""


@pytest.mark.parametrize(
    ("device", "key"),
    mostly_long([("shm", "ready"), ("tcp", "ready"), ("shm", "never")], [("tcp", "ready"), ("shm", "never")]),
)
def test_a_receive_from_a_worker_that_died_fails(device: str, key: str) -> None:
    ended = run_job(die, key, True, servers=0, device=device)
    assert ended.cause is not None
    assert "worker 1" in str(ended.cause)
    assert ended.results[0].startswith("AbortedError: ")
    assert key in ended.results[0]


def test_the_job_ends_with_the_first_failure_not_with_what_follows_from_it() -> None:
    ended = run_job(die, "ready", False, servers=0)
    assert str(ended.cause).startswith("worker 1 is gone")
    assert ended.errors[0].startswith("AbortedError")


def refused(job: tw.Job) -> list[str]:
    tf, twt = load()
    said = []
    for call in (
        lambda: twt.send(1.0, "key", to=job.rank),
        lambda: twt.send(1.0, "key", to=2),
        lambda: twt.send(1.0, "", to=1 - job.rank),
        lambda: twt.send(tf.raw_ops.StackV2(max_size=1, elem_type=tf.float32), "key", to=1 - job.rank),
        lambda: twt.send([1.0], "key", to=1 - job.rank, shape=[None, None]),
        lambda: (twt.send(1.0, "twice", to=1 - job.rank), twt.send([1.0], "twice", to=1 - job.rank)),
    ):
        with pytest.raises(errors.ArgumentError) as raised:
            call()
        said.append(str(raised.value))
    twt.recv("twice", [], source=1 - job.rank)
    with pytest.raises(tf.errors.InvalidArgumentError):
        twt.send(1.0, "twice", to=1 - job.rank, step=-1)
    return said


REFUSED = [
    "worker 0 exchanges tensors with worker 1, not with worker 0",
    "not with worker 2",
    "must be a string",
    "of resource, which cannot leave its worker",
    "the tensor has shape (1,), and the receive takes (None, None)",
    "take another key",
]


def test_order_loops_what_is_kept_and_what_is_refused() -> None:
    either = [partial(either_first, receiver_first=first) for first in (True, False)]
    sender, receiver = run_job(in_turn, keep, *either, loops, refused, servers=0).ok()
    assert [found[0] for found in (sender[0], receiver[0])] == [6 * 5, 6 * 4]  # copies: what is only used has none here
    _, kept, results = receiver[0]
    assert kept == [[5.0 + 2] * 2] * 4
    assert results == [[call, call + 1, call + 3, 8 * 2 * (call + 4.0)] for call in range(6)]
    assert receiver[1:3] == [[*map(float, range(MANY))]] * 2
    assert receiver[3] == [123456.0] * 4
    for said, part in zip(sender[4], REFUSED, strict=True):
        assert part in said
