"""Two workers of TensorFlow: in a job of Tensorwire's, or in a cluster of TensorFlow's own servers over gRPC."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tensorwire.bench.actors import store_job
from tensorwire.bench.actors.lines import Lines, Run
from tensorwire.bench.actors.transfer import counts, since

INTER, INTRA = 2, 1  # threads of each worker: for operators at a time, and for each of these


def limit_threads() -> None:
    """Before the first tensor: as many for functions as `serve` has for sessions."""
    tf.config.threading.set_inter_op_parallelism_threads(INTER)
    tf.config.threading.set_intra_op_parallelism_threads(INTRA)


def serve(lines: Lines, index: int) -> Any:
    """This worker's server in a cluster of two. Graphs are not run eagerly from then on."""
    ours = f"127.0.0.1:{free_port()}"
    theirs = lines.hello(ours).split()[0]
    tf.compat.v1.disable_eager_execution()
    workers = [ours, theirs] if index == 0 else [theirs, ours]
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=INTER, intra_op_parallelism_threads=INTRA)
    cluster = tf.train.ClusterSpec({"worker": workers})
    return tf.distribute.Server(cluster, job_name="worker", task_index=index, config=config)


def join(lines: Lines, index: int, device: str) -> Any:
    """This worker's job of two."""
    import tensorwire as tw
    from tensorwire.control import Coordinator

    os.environ.setdefault("TENSORWIRE_SECRET", secrets.token_hex(32))
    address = Coordinator(os.environ["TENSORWIRE_SECRET"].encode(), workers=2, servers=0).address if index else "-"
    store_job.join(lines, index, device, 2, 0, address)
    if index:
        os.environ["TENSORWIRE_COORDINATOR"] = address
    return tw.init()


def time_calls(lines: Lines, run: Run, call: Callable[[], Any] | None, tell: Callable[[Any], dict[str, float]]) -> None:
    """Answers a round of calls with what ``tell`` says of the last one's result. None: this worker has no part."""
    if call is None:
        lines.answer()
        return
    for _ in range(run.warm):
        tell(call())
    before, start = counts(), time.perf_counter()
    for _ in range(run.count):
        result = call()
    lines.answer(time.perf_counter() - start, **tell(result), **since(before))


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
