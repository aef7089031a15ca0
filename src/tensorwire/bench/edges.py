"""``bench edge``: tensors of one size over one edge, beside gRPC, torch RPC and gloo with the same ends.

A steady stream, for everybody: the producer makes the next tensor while the consumer is at the last. Where the payload
is born in mapped memory no byte moves; the mode says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tensorwire.bench.baselines import KEEP, Peer, Peers
from tensorwire.bench.compare import Workload
from tensorwire.bench.programs import OURS, Contender, actors, pair
from tensorwire.bench.records import Target, size_text
from tensorwire.bench.stores import GRPC

KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = (KIB, 64 * KIB, MIB, 64 * MIB, GIB)
QUICK_SIZES = (KIB, MIB)
LARGE = 256 * MIB  # from here on few rounds
_FLAG = 8  # bytes of payload in the C flag: it moves none either, to speak of
_DEPTH = 2  # tensors on their way
_STREAM = 4  # tensors of a round at least: one alone is no stream
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
_MESSAGES = (
    "grpcio over TCP, tuned as for bench store; one stream, a message of raw bytes a tensor (tobytes, frombuffer)"
)
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
# Bytes that ours may take for each byte of a tensor, on a device that maps and on one that does not.
_KINDS = {"static": (4, 6), "bounded": (4, 6), "dynamic": (5, 8)}
_HOW = {
    "static": "static edge of two slots",
    "bounded": "bounded edge of two slots, whose bound is the size",
    "dynamic": "dynamic edge; a lease a tensor from a pool of two",
}
_TITLES = {
    "transfer": "transfer alone",
    "transfer-mapped": "transfer alone (no byte moved)",
    "whole": "produced, transferred, consumed",
    "whole-mapped": "produced, transferred (no byte moved), consumed",
}
# The least ratio to gRPC's time with the same ends, by bytes; what is smaller than 64 KiB has its ratio.
_WHOLE = {"shm": {64 * KIB: 20.0, MIB: 6.0, 64 * MIB: 4.0}, "tcp": {MIB: 3.0}}
_TRANSFER = 25.0  # what the paper says of a transfer alone
_SIGNAL = 2e-6


def workloads(devices: Sequence[str], nbytes: int, peers: Peers, names: Sequence[str]) -> list[Workload]:
    """The transfer alone, then with a producer and a consumer, over each device; ``names``: the peers of `OTHERS`."""
    made = []
    for device in devices:
        ours = _ours(device, nbytes)
        others = _others(device, nbytes, peers, names)
        floor = replace(ours[0], name="ends alone", how="what both ends do, without anything between them")
        lists = {"transfer": [*ours, *_limits(device, nbytes, peers), *others], "whole": [*ours, floor, *others]}
        for word, contenders in lists.items():
            mode = f"{word}-mapped" if device == "shm" else word
            made.append(
                Workload(
                    "edge",
                    device,
                    f"{device} edge, {size_text(nbytes)}, {_TITLES[mode]}",
                    nbytes,
                    mode,
                    tuple(replace(c, word="alone" if c is floor else word) for c in contenders),
                    limits=("grpc", "C flag", "C sockets", floor.name),
                    target=_target(word, device, nbytes),
                    stage=f"{device}, {nbytes}",
                    least=_STREAM,
                )
            )
    return made


def _target(word: str, device: str, nbytes: int) -> Target | None:
    if word == "transfer":
        return Target(_SIGNAL, {"grpc": _TRANSFER}) if device == "shm" else None
    share = _WHOLE.get(device, {}).get(max(nbytes, 64 * KIB))
    return None if share is None else Target(shares={"grpc": share})


def _ours(device: str, nbytes: int) -> list[Contender]:
    return [
        Contender(
            OURS if kind == "static" else f"{OURS}, {kind}",
            actors("edge", device, kind, nbytes),
            memory=memory[device != "shm"] * nbytes,
            how=_HOW[kind],
        )
        for kind, memory in _KINDS.items()
    ]


def _limits(device: str, nbytes: int, peers: Peers) -> list[Contender]:
    if device != "shm":
        made = peers.sockets(nbytes, (0, 256 * KIB), _DEPTH)
        return [replace(c, memory=2 * nbytes) for c in made]
    flag = peers.copies(_FLAG, "stream", ("memcpy",), "C flag")
    copy = peers.copies(nbytes, "stream", ("memcpy",), "C memcpy")
    return [*(replace(c, name="C flag") for c in flag), *(replace(c, memory=3 * nbytes) for c in copy)]


def _others(device: str, nbytes: int, peers: Peers, names: Sequence[str]) -> list[Contender]:
    return [
        Contender(
            other.name,
            pair(program, device, nbytes, *other.arguments),
            asleep=other.peer.asleep,
            stopped=True,
            environment=other.peer.environment,
            memory=other.memory * nbytes,
            how=other.how,
        )
        for other in OTHERS
        if other.peer.name in names and (program := peers.program(other.peer))
    ]
