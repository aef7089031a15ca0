"""Tensors of TensorFlow that cross between two workers: ``INDEX RUNTIME DEVICE``; the word is ``BYTESxCROSSINGS``.

``grpc`` is TensorFlow's own runtime: a server in each process, and a session of worker 0. All others are Tensorwire's;
with ``arena``, tensors lie in shared memory. All run the same chain: an addition, then a crossing to the other worker,
and so on, in one call; or with an ``x`` at the end of the word, the additions on one worker alone. Each number that
comes out must be the sum of all additions.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf
from tensorflow_runtimes import join, limit_threads, serve, time_calls

from tensorwire.bench.actors.lines import Lines

GRPC, ARENA = "grpc", "arena"
Call = Callable[[], list[float]]


def chain(x: Any, step: Any, crossings: int, alone: bool) -> tuple[Any, Any]:
    """The first and the last number after so many crossings.

    ``step`` is -1, and no constant: TensorFlow would make one addition of all that follow each other.
    """
    with tf.device("/job:worker/task:0"):
        x = x - step
    for number in range(1, crossings + 1):
        with tf.device(f"/job:worker/task:{0 if alone else number % 2}"):
            x = x - step
    with tf.device("/job:worker/task:0"):
        return x[0], x[-1]


def grpc_calls(lines: Lines, index: int) -> Callable[[int, int, bool], Call | None]:
    """Calls of TensorFlow's own runtime; None in worker 1, whose server works by itself."""
    server = serve(lines, index)

    def make(nbytes: int, crossings: int, alone: bool) -> Call | None:
        if index:
            return None
        with tf.Graph().as_default():
            with tf.device("/job:worker/task:0"):
                start = tf.compat.v1.placeholder_with_default(tf.zeros([nbytes // 4]), [nbytes // 4])
                step = tf.compat.v1.placeholder_with_default(-1.0, [])
            fetched = chain(start, step, crossings, alone)
            session = tf.compat.v1.Session(server.target)
        return lambda: [float(value) for value in session.run(fetched)]

    return make


def our_calls(lines: Lines, index: int, device: str) -> Callable[[int, int, bool], Call | None]:
    """Calls of a function that is cut over the workers."""
    from tensorwire.tensorflow import distribute

    join(lines, index, device)

    def make(nbytes: int, crossings: int, alone: bool) -> Call:
        start, step = tf.zeros([nbytes // 4]), tf.constant(-1.0)
        call = distribute(tf.function(lambda x, step: chain(x, step, crossings, alone)))
        return lambda: [float(value) for value in call(start, step)]

    return make


def main(index: str, runtime: str, device: str) -> None:
    """Runs until its input ends."""
    lines = Lines()
    if runtime == ARENA:
        importlib.import_module("tensorwire.tensorflow.arena")
    limit_threads()
    make = grpc_calls(lines, int(index)) if runtime == GRPC else our_calls(lines, int(index), device)
    calls: dict[str, Call | None] = {}
    for run in lines.runs():
        nbytes, crossings, *alone = run.word.split("x")
        if run.word not in calls:
            calls[run.word] = make(int(nbytes), int(crossings), bool(alone))
        run = replace(run, warm=run.warm + 1)  # the first call of a part connects its edges
        time_calls(lines, run, calls[run.word], functools.partial(check, int(crossings)))


def check(crossings: int, results: list[float]) -> dict[str, float]:
    """Tells nothing. Raises `SystemExit` where a number is not the sum of all additions."""
    if results != [crossings + 1.0] * 2:
        raise SystemExit(f"after {crossings} crossings the numbers are {results}")
    return {}


if __name__ == "__main__":
    main(*sys.argv[1:])
