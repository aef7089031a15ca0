"""Networks of TensorFlow that two workers train: ``INDEX RUNTIME DEVICE``.

The word is ``NAME,PLACEMENT,WHAT,SHRINK,SIZE``.

``grpc`` is TensorFlow's own runtime: a server in each process, and a session of worker 0. All else is Tensorwire's.
PLACEMENT ``servers``: worker 1 has the variables and updates them, worker 0 computes. ``halves``: each worker has a
part of the network with its variables. WHAT is a ``step``; or ``compute``, the same on worker 0 alone; or ``transfer``:
tensors of the same sizes cross as in a step, and nothing is computed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf
from tensorflow_models import NETWORKS, Network, batch
from tensorflow_runtimes import join, limit_threads, serve, time_calls

from tensorwire.bench.actors.lines import Lines

GRPC = "grpc"
RATE = 1e-4
SETTLE = 6  # calls until both runtimes have made all that they make once
Call = Callable[[], float]


def task(rank: int) -> str:
    """A worker's device."""
    return f"/job:worker/task:{rank}"


def where(placement: str, what: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """The workers of the two parts' variables, and of their operators."""
    if what == "compute":
        return (0, 0), (0, 0)
    return ((1, 1), (0, 0)) if placement == "servers" else ((0, 1), (0, 1))


def forward(network: Network, ranks: tuple[int, int], x: Any, y: Any) -> Any:
    """The loss, each part's operators on a worker."""
    with tf.device(task(ranks[0])):
        middle = network.first([x])
    with tf.device(task(ranks[1])):
        return network.loss(network.second(middle), y)


def passed(tensor: Any, rank: int) -> Any:
    """The same tensor on a worker; no runtime knows what it is before."""
    with tf.device(task(rank)):
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)


def crossings(network: Network, placement: str, x: Any) -> Any:
    """As many tensors as in a step, there and back: a number that depends on all of them."""
    if placement == "servers":
        there = [passed(tf.convert_to_tensor(v), 0) for v in network.variables]
        back = [passed(one, 1) for one in there]
    else:
        middle = [tf.zeros(one.shape, one.dtype) for one in shapes(network, x)]
        back = [passed(passed(passed(one, 0), 1), 0) for one in middle]
    with tf.device(task(1 if placement == "servers" else 0)):
        return tf.add_n([tf.reshape(one, [-1])[0] for one in back])


def shapes(network: Network, x: Any) -> list[Any]:
    """What crosses between the two parts."""

    @tf.function
    def first(x: Any) -> Any:
        return network.first([x])

    found: list[Any] = first.get_concrete_function(tf.TensorSpec(x.shape, x.dtype)).structured_outputs
    return found


class Ours:
    """Calls of functions that are cut over the workers."""

    def __init__(self, lines: Lines, index: int, device: str) -> None:
        self._index = index
        join(lines, index, device)

    def make(self, name: str, placement: str, what: str, shrink: int, size: int) -> Call | None:
        """A step; None where this worker has no part in it."""
        from tensorwire.tensorflow import distribute, worker

        owners, ranks = where(placement, what)
        alone = what == "compute"
        if alone and self._index:
            return None
        network = NETWORKS[name](shrink, lambda part: contextlib.nullcontext() if alone else worker(owners[part]))
        x, y = (tf.constant(each) for each in batch(name, size))

        def step(x: Any, y: Any) -> Any:
            if what == "transfer":
                return crossings(network, placement, x)
            with tf.GradientTape() as tape:
                loss = network.loss(network.second(network.first([x])), y) if alone else forward(network, ranks, x, y)
            for variable, gradient in zip(network.variables, tape.gradient(loss, network.variables), strict=True):
                variable.assign_sub(RATE * gradient)
            return loss

        call = tf.function(step) if alone else distribute(tf.function(step))
        return lambda: float(call(x, y))


class Own:
    """Runs of a session of TensorFlow's own."""

    def __init__(self, lines: Lines, index: int) -> None:
        self._index, self._server = index, serve(lines, index)

    def make(self, name: str, placement: str, what: str, shrink: int, size: int) -> Call | None:
        """As `Ours.make`."""
        if self._index:
            return None
        owners, ranks = where(placement, what)
        with tf.Graph().as_default():
            network = NETWORKS[name](shrink, lambda part: tf.device(task(owners[part])))
            with tf.device(task(0)):
                x, y = (tf.compat.v1.placeholder_with_default(each, each.shape) for each in batch(name, size))
            fetched = (
                crossings(network, placement, x) if what == "transfer" else self._step(network, owners, ranks, x, y)
            )
            follow_operands()
            session = tf.compat.v1.Session(self._server.target)
            session.run([variable.initializer for variable in network.variables])
        return lambda: float(session.run(fetched))

    def _step(self, network: Network, owners: Any, ranks: Any, x: Any, y: Any) -> Any:
        from tensorwire.tensorflow.placement import gradients_beside_their_operators

        with gradients_beside_their_operators(), tf.GradientTape() as tape:
            loss = forward(network, ranks, x, y)
            gradients = tape.gradient(loss, network.variables)
        updates = []
        for number, (variable, gradient) in enumerate(zip(network.variables, gradients, strict=True)):
            with tf.device(task(owners[number >= network.split])):
                updates.append(variable.assign_sub(RATE * gradient, read_value=False))
        with tf.control_dependencies(updates), tf.device(task(0)):
            return tf.identity(loss)


def follow_operands() -> None:
    """What has no device, such as a sum of gradients, gets that of its last operand, as ours does."""
    for op in tf.compat.v1.get_default_graph().get_operations():
        placed = [tensor.op.device for tensor in op.inputs if tensor.op.device]
        if not op.device and placed:
            op._set_device(placed[-1])


def main(index: str, runtime: str, device: str) -> None:
    """Runs until its input ends."""
    lines = Lines()
    limit_threads()
    runs = Own(lines, int(index)) if runtime == GRPC else Ours(lines, int(index), device)
    made, call, settled = "", None, [0.0]
    for run in lines.runs():
        if made != run.word:
            name, placement, what, shrink, size = run.word.split(",")
            call = None  # its memory goes first
            made, call = run.word, runs.make(name, placement, what, int(shrink), int(size))
            settled = [call() for _ in range(SETTLE)] if call is not None else [0.0]
        time_calls(lines, run, call, lambda loss, first=settled[0]: {"first": first, "loss": loss})


if __name__ == "__main__":
    main(*sys.argv[1:])
