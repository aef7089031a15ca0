"""The transport of a cut function's tensors: Tensorwire's edges, or TensorFlow's own gRPC runtime."""

from __future__ import annotations

import logging
import socket
from typing import Literal

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context  # private to TensorFlow 2.21

from tensorwire.control.settings import step_timeout
from tensorwire.errors import ArgumentError, TensorwireError, Unsupported
from tensorwire.launch.worker import Worker, current_worker
from tensorwire.tensorflow.operator_edges import load_operators

_log = logging.getLogger("tensorwire")
Protocol = Literal["tensorwire", "grpc"]
_chosen: tuple[Worker, Protocol] | None = None


def use_protocol(protocol: str = "auto") -> Protocol:
    """Chooses the transport of cut functions' tensors. Every worker calls it, after ``init()``, with one protocol.

    Without this call it is ``"tensorwire"``. `send`, `recv` and `StoreOptimizer` use nothing else. Call it before the
    first tensor or variable is made.

    Args:
        protocol: ``"tensorwire"``: edges. ``"grpc"``: TensorFlow's gRPC runtime, which authenticates nobody: use it in
            a network that you trust. ``"auto"``: edges, or gRPC with a warning if a worker has no compiler for their
            operators.

    Returns:
        The protocol in use.

    Raises:
        ArgumentError: There is no such protocol, the workers named different ones, or there are tensors already.
        Unsupported: With ``"tensorwire"``, this worker cannot have the operators.
        WaitTimeout, JobEnded: Another worker did not come in time, or the job has ended.
    """
    global _chosen
    if protocol not in ("tensorwire", "grpc", "auto"):
        raise ArgumentError(f"protocol must be 'tensorwire', 'grpc' or 'auto', not {protocol!r:.100}")
    if context.context()._initialized:
        raise ArgumentError("call use_protocol() before the first tensor or variable is made")
    worker = current_worker()
    first = worker.collectives.broadcast(protocol, 0, step_timeout())
    if first != protocol:
        raise ArgumentError(f"worker {worker.rank} uses protocol {protocol!r}, and worker 0 {first!r}: use one")
    reason = "" if protocol == "grpc" else _why_not()
    if protocol == "tensorwire" and reason:
        raise Unsupported(reason)
    reasons = [worker.collectives.broadcast(reason, rank, step_timeout()) for rank in range(worker.num_workers)]
    lacking = next((rank for rank, why in enumerate(reasons) if why), None)
    found: Protocol = "grpc" if protocol == "grpc" or lacking is not None else "tensorwire"
    if lacking is not None and worker.rank == 0:
        _log.warning("worker %d cannot use edges, so that gRPC is used: %s", lacking, reasons[lacking])
    if found == "grpc":
        _start_grpc(worker)
    _chosen = worker, found
    return found


def protocol_in_use() -> Protocol:
    """What `use_protocol` has chosen in this job."""
    worker = current_worker()
    return _chosen[1] if _chosen is not None and _chosen[0] is worker else "tensorwire"


def _why_not() -> str:
    try:
        load_operators()
    except TensorwireError as error:
        return str(error)
    return ""


def _start_grpc(worker: Worker) -> None:
    """Every worker's TensorFlow serves the others', as for ``MultiWorkerMirroredStrategy``.

    Private to TensorFlow 2.21: ``context.enable_collective_ops``.
    """
    with socket.socket() as free:
        free.bind((worker.member.interface, 0))
        mine = f"{worker.member.interface}:{free.getsockname()[1]}"
    addresses = [worker.collectives.broadcast(mine, rank, step_timeout()) for rank in range(worker.num_workers)]
    server = tensorflow_server_pb2.ServerDef(job_name="worker", task_index=worker.rank, protocol="grpc")
    job = server.cluster.job.add(name="worker")
    for rank, address in enumerate(addresses):
        job.tasks[rank] = address
    server.default_session_config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
    context.context().enable_collective_ops(server)
    tf.zeros([])  # the server runs from now on
    worker.collectives.barrier(step_timeout())
