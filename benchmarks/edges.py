"""``python -m benchmarks edge``: ``tensorwire bench edge`` over all kinds of edges, beside gRPC and gloo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks import ACTORS
from benchmarks.libraries import GRPC, KEEP, Libraries, Peer
from benchmarks.options import Options
from tensorwire.bench import edges
from tensorwire.bench.compare import Settings, Workload
from tensorwire.bench.edges import KIB, MIB
from tensorwire.bench.limits import Limits
from tensorwire.bench.programs import OURS, Contender, actor, pair
from tensorwire.bench.records import Record, Target
from tensorwire.bench.show import Notes
from tensorwire.bench.suite import stream


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
        "gloo",
        Peer("gloo", "gloo_edge.py", ("torch", "tensorwire"), "pip install torch", asleep=False, environment=KEEP),
        8,
        "torch.distributed over TCP; isend and irecv between two tensors at each end",
    ),
)
KINDS = {
    "bounded": "bounded edge of two slots, whose bound is the size",
    "dynamic": "dynamic edge; a lease a tensor from a pool of two",
}
# The least ratio to gRPC's time with the same ends, by bytes; what is smaller than 64 KiB has its ratio.
_WHOLE = {"shm": {64 * KIB: 20.0, MIB: 6.0, 64 * MIB: 4.0}, "tcp": {MIB: 3.0}}
_TRANSFER = 25.0  # what the paper says of a transfer alone


def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """Size by size."""
    limits, libraries = Limits(notes), Libraries(options.peer_python, notes)

    def made(nbytes: int) -> list[Workload]:
        return workloads(options.devices, nbytes, limits, libraries, options.peers)

    return stream(options, settings, notes, made)


def workloads(
    devices: Sequence[str], nbytes: int, limits: Limits, libraries: Libraries, names: Sequence[str]
) -> list[Workload]:
    """The package's own, each with other kinds of edges, and with the peers of `OTHERS` that ``names`` has."""
    made = []
    for workload in edges.workloads(devices, nbytes, limits):
        ours, *others = workload.contenders
        kinds = [_kind(kind, ours, workload) for kind in KINDS]
        contenders = (ours, *kinds, *others, *_others(workload, libraries, names))
        limit = ("grpc", *workload.limits)
        made.append(replace(workload, contenders=contenders, limits=limit, target=_target(workload)))
    return made


def _kind(kind: str, static: Contender, workload: Workload) -> Contender:
    commands = pair(actor("edge_kinds", ACTORS), workload.device, workload.nbytes, kind)
    return replace(static, name=f"{OURS}, {kind}", commands=commands, how=KINDS[kind])


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
