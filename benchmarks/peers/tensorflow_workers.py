"""Workers that train one network, each on its own batches: ``ROLE INDEX WAY NAME SHRINK SIZE DEVICE WORKERS SERVERS
HOST``.

ROLE: ``server``, ``worker``, or ``chief``. The ways are TensorFlow's, ``mirrored``, by gradients that workers sum up,
and ``ps``, by a parameter server whose chief gives workers their steps; and ours, ``sync`` and ``async``, by gradients
that workers average, or that a server's optimizer takes one by one. There are two workers, and
one server where there is any. All update by SGD.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import tensorflow as tf
from tensorflow_models import NETWORKS, Network, batch
from tensorflow_runtimes import free_port, limit_threads

from benchmarks.actors import members
from tensorwire.bench.actors import store_job
from tensorwire.bench.actors.lines import Lines, timed
from tensorwire.bench.actors.transfer import counts, since

WORKERS = 2
RATE = 1e-3
Steps = Callable[[int], float]  # takes so many, and returns the last loss


def mine(name: str, size: int, rank: int) -> tuple[Any, Any]:
    """A worker's batch."""
    x, y = batch(name, WORKERS * size)
    axis = 1 if name in ("lstm", "gru") else 0
    return tf.constant(x.take(range(rank, WORKERS * size, WORKERS), axis)), tf.constant(y[rank::WORKERS])


def network_of(name: str, shrink: int) -> Network:
    """The network, with the values that it has in every process."""
    return NETWORKS[name](shrink, lambda _: contextlib.nullcontext())


def gradients_of(network: Network, x: Any, y: Any) -> tuple[Any, list[Any]]:
    """The loss, and the gradient of each variable."""
    with tf.GradientTape() as tape:
        loss = network.loss(network.second(network.first([x])), y)
    return loss, tape.gradient(loss, network.variables)


def repeated(step: Callable[[], Any]) -> Steps:
    """The steps of a function without arguments."""

    def steps(count: int) -> float:
        for _ in range(count):
            loss = step()
        return float(loss)

    return steps


# ---- ours


def ours(lines: Lines, index: int, way: str, device: str, name: str, shrink: int, size: int) -> Steps:
    """A worker of a job with one server."""
    import tensorwire as tw
    from tensorwire.tensorflow import StoreOptimizer

    store_job.join(lines, index, device, WORKERS, 1)
    tw.init()
    network = network_of(name, shrink)
    x, y = mine(name, size, index)
    mode = tw.store.Async() if way == "async" else tw.store.Sync()
    optimizer = StoreOptimizer(keras.optimizers.SGD(RATE), mode=mode, on_servers=way == "async")
    optimizer.build(network.variables)

    @tf.function
    def step() -> Any:
        loss, gradients = gradients_of(network, x, y)
        optimizer.apply(gradients, network.variables)
        return loss

    return repeated(step)


# ---- TensorFlow's own


def cluster_of(addresses: list[str]) -> Any:
    """The cluster of a parameter server, the workers, and their chief."""
    return tf.train.ClusterSpec({"ps": addresses[:1], "worker": addresses[1:-1], "chief": addresses[-1:]})


def mirrored(lines: Lines, index: int, name: str, shrink: int, size: int) -> Steps:
    """A worker of ``MultiWorkerMirroredStrategy``, whose gradients go round in a ring."""
    ours = f"127.0.0.1:{free_port()}"
    theirs = lines.hello(ours).split()[0]
    addresses = [theirs, ours] if index else [ours, theirs]
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        network = network_of(name, shrink)
    x, y = mine(name, size, index)

    def update(strategy: Any, gradients: list[Any]) -> None:
        for variable, gradient in zip(network.variables, gradients, strict=True):
            strategy.extended.update(variable, lambda v, g: v.assign_sub(RATE / WORKERS * g), args=(gradient,))

    def replica() -> Any:
        loss, gradients = gradients_of(network, x, y)
        context = tf.distribute.get_replica_context()
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients, options=options)
        context.merge_call(update, args=(summed,))
        return loss

    return repeated(tf.function(lambda: strategy.run(replica)))


def serve(lines: Lines, role: str, index: int) -> None:
    """A server of ``ParameterServerStrategy``, of parameters or a worker: the chief's steps come to it."""
    ours = f"127.0.0.1:{free_port()}"
    cluster, job = cluster_of(lines.hello(ours).split()), "ps" if role == "server" else "worker"
    server = tf.distribute.Server(cluster, job_name=job, task_index=index, protocol="grpc")
    threading.Thread(target=server.join, daemon=True).start()
    for _ in lines.runs():
        lines.answer()


def chief(lines: Lines, name: str, shrink: int, size: int) -> Steps:
    """The chief, which computes nothing: ``count`` steps are as many of each worker."""
    cluster = cluster_of(lines.hello(f"127.0.0.1:{free_port()}").split())
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, task_type="chief", task_id=0)
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        network = network_of(name, shrink)

    x, y = mine(name, size, 0)

    @tf.function
    def step() -> Any:
        def replica() -> Any:
            loss, gradients = gradients_of(network, x, y)
            for variable, gradient in zip(network.variables, gradients, strict=True):
                variable.assign_sub(RATE * gradient)
            return loss

        return strategy.run(replica)

    def steps(count: int) -> float:
        for _ in range(WORKERS * count):
            last = coordinator.schedule(step)
        coordinator.join()
        return float(last.fetch())

    return steps


def main(role: str, index: str, way: str, name: str, shrink: str, size: str, device: str, *_: str) -> None:
    """Runs until its input ends."""
    lines = Lines()
    limit_threads()
    network = name, int(shrink), int(size)
    if way == "ps" and role != "chief":
        serve(lines, role, int(index))
        return
    if role == "server":
        members.serve(lines, 0, device, WORKERS, 1, "127.0.0.1")
        return
    if role == "chief":
        steps = chief(lines, *network)
    elif way == "mirrored":
        steps = mirrored(lines, int(index), *network)
    else:
        steps = ours(lines, int(index), way, device, *network)
    losses: list[float] = []

    def take(count: int) -> None:
        losses.append(steps(count))

    for run in lines.runs():
        if not losses:
            take(1)
            take(1)  # after one update
        before = counts()
        lines.answer(timed(run, take), second=losses[1], loss=losses[-1], **since(before))


if __name__ == "__main__":
    main(*sys.argv[1:])
