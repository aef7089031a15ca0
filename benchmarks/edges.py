"""``python -m benchmarks edge``: the streams of ``tensorwire bench edge``, beside gRPC, torch RPC and gloo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.libraries import KEEP, Libraries, Peer
from benchmarks.stores import GRPC
from tensorwire.bench import edges
from tensorwire.bench.compare import Workload
from tensorwire.bench.edges import KIB, MIB
from tensorwire.bench.limits import Limits
from tensorwire.bench.programs import Contender, pair
from tensorwire.bench.records import Target

_TORCH = ("torch", "tensorwire")


@dataclass(frozen=True)
class Other:
    """A library with the same ends. ``memory``: bytes it may take for each byte of a tensor; ``how``: for people."""

    name: str
    peer: Peer
    memory: int
    how: str
    arguments: tuple[str, ...] = ()


_GRPC = replace(GRPC, script="grpc_edge.py")
_MESSAGES = "grpcio over TCP, tuned as for stores; one stream, a message of raw bytes a tensor (tobytes, frombuffer)"
OTHERS = (
    Other("grpc", _GRPC, 16, f"{_MESSAGES}, a byte back for each, two on their way", ("credits",)),
    Other("grpc, no credits", _GRPC, 16, f"{_MESSAGES}, as many on their way as its flow control lets", ("flow",)),
    Other(
        "torch-rpc",
        Peer("torch-rpc", "torch_rpc_edge.py", _TORCH, "pip install torch", environment=KEEP),
        10,
        "torch.distributed.rpc, TensorPipe as it comes; rpc_async with a tensor as argument, two calls on their way",
    ),
    Other(
        "gloo",
        Peer("gloo", "gloo_edge.py", _TORCH, "pip install torch", asleep=False, environment=KEEP),
        8,
        "torch.distributed over TCP; isend and irecv between two tensors at each end",
    ),
)
# The least ratio to gRPC's time with the same ends, by bytes; what is smaller than 64 KiB has its ratio.
_WHOLE = {"shm": {64 * KIB: 20.0, MIB: 6.0, 64 * MIB: 4.0}, "tcp": {MIB: 3.0}}
_TRANSFER = 25.0  # what the paper says of a transfer alone


def workloads(
    devices: Sequence[str], nbytes: int, limits: Limits, libraries: Libraries, names: Sequence[str]
) -> list[Workload]:
    """The package's own, each with the peers of `OTHERS` that ``names`` has."""
    return [
        replace(
            workload,
            contenders=(*workload.contenders, *_others(workload, libraries, names)),
            limits=("grpc", *workload.limits),
            target=_target(workload),
        )
        for workload in edges.workloads(devices, nbytes, limits)
    ]


def _target(workload: Workload) -> Target | None:
    if workload.mode.startswith("transfer"):
        return replace(workload.target, shares={"grpc": _TRANSFER}) if workload.target else None
    share = _WHOLE.get(workload.device, {}).get(max(workload.nbytes, 64 * KIB))
    return None if share is None else Target(shares={"grpc": share})


def _others(workload: Workload, libraries: Libraries, names: Sequence[str]) -> list[Contender]:
    return [
        Contender(
            other.name,
            pair(program, workload.device, workload.nbytes, *other.arguments),
            asleep=other.peer.asleep,
            stopped=True,
            word=workload.mode.removesuffix("-mapped"),
            environment=other.peer.environment,
            memory=other.memory * workload.nbytes,
            how=other.how,
        )
        for other in OTHERS
        if other.peer.name in names and (program := libraries.program(other.peer))
    ]
