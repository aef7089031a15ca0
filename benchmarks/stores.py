"""``python -m benchmarks store``: the steps of ``tensorwire bench store``, beside a store on gRPC.

It has the same plan, rule, processes and cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.libraries import KEEP, Libraries, Peer
from tensorwire.bench import key_modes, links, row_batches, stores
from tensorwire.bench.compare import Workload
from tensorwire.bench.models import Model
from tensorwire.bench.programs import Contender
from tensorwire.bench.records import Target
from tensorwire.bench.stores import MIB, RULES, StoreJob

LARGE = 64 * MIB  # bytes of a model, from which on tcp has a target
_MALLOC = {**KEEP, "MALLOC_ARENA_MAX": "1"}  # threads free what others allocate: a quarter of the page faults
GRPC = Peer("grpc", "grpc_store.py", ("grpc", "torch", "tensorwire"), "pip install grpcio", environment=_MALLOC)
GRPC_PUSHES = replace(GRPC, script="grpc_pushes.py")
GRPC_ROWS = replace(GRPC, script="grpc_rows.py")
TORCHFT = Peer("torchft", "torchft_diloco.py", ("torchft", "tensorwire"), "pip install torchft opentelemetry-sdk")
_ROWS = 5.0
_PUSHES_TCP = 8.0
# Of FCN-5 with two workers over shm: the least ratio to gRPC's time.
_SHM = {"exchange-copied": 15.0, "exchange-mapped": 50.0, "step-copied": 6.0, "step-mapped": 8.0}
_TCP = 3.0


def workloads(job: StoreJob, devices: Sequence[str], libraries: Libraries) -> list[Workload]:
    """The package's own, each with the store on gRPC."""
    made = []
    for workload in stores.workloads(job, devices):
        (ours,) = workload.contenders
        rule = next(rule for rule, kind in RULES.items() if workload.mode.startswith(kind))
        contenders = (ours, *(replace(c, word=ours.word) for c in _grpc(job, rule, libraries)))
        target = _target(job, workload)
        made.append(replace(workload, contenders=contenders, limits=("grpc",), target=target))
    return made


def pushes(devices: Sequence[str], libraries: Libraries) -> list[Workload]:
    """The package's small pushes beside gRPC: a message per push, as the store on gRPC has per bucket, and per call."""
    made = []
    program = libraries.program(GRPC_PUSHES)
    arguments = (str(key_modes.PUSHES), str(key_modes.BYTES), "127.0.0.1")
    commands = tuple((*program, role, *arguments) for role in ("server", "worker"))
    for workload in (w for device in devices for w in key_modes.pushes(device)):
        (ours,) = workload.contenders
        theirs = Contender("grpc", commands, stopped=True, servers=1, environment=_MALLOC, word="one")
        several = ours.word == "list"
        contenders = [replace(theirs, word="split"), replace(theirs, name="grpc, a message per call", word="list")]
        contenders = (contenders if several else [theirs]) if program else []
        tcp = workload.device == "tcp" and several
        target = Target(shares={"grpc": _PUSHES_TCP}) if tcp else workload.target
        made.append(replace(workload, contenders=(ours, *contenders), limits=("grpc",), target=target))
    return made


def rows(devices: Sequence[str], libraries: Libraries, *, quick: bool) -> list[Workload]:
    """The package's batches of rows, each beside a table on gRPC."""
    made = []
    program = libraries.program(GRPC_ROWS)
    for workload in row_batches.workloads(devices, 1, quick=quick):
        (ours,) = workload.contenders
        arguments = (ours.commands[-1][-5], "127.0.0.1")
        commands = tuple((*program, role, *arguments) for role in ("server", "worker"))
        theirs = [Contender("grpc", commands, stopped=True, servers=1, environment=_MALLOC)] if program else []
        target = Target(shares={"grpc": _ROWS})
        made.append(replace(workload, contenders=(ours, *theirs), limits=("grpc",), target=target))
    return made


def diloco(libraries: Libraries, model: Model, compute: float, names: tuple[str, str]) -> list[Contender]:
    """torchft's own streaming DiLoCo, on the cable as ours."""
    program = libraries.program(TORCHFT)
    if not program:
        return []
    here, there = (links.inside(name) for name in names)
    words = (model.name, str(compute))
    commands = (
        (*here, *program, "server", "0", *words, links.ADDRESSES[0]),
        (*here, *program, "worker", "1", *words, links.ADDRESSES[0]),
        (*there, *program, "worker", "0", *words, links.ADDRESSES[1]),
    )
    return [Contender(TORCHFT.name, commands, servers=1)]


def _target(job: StoreJob, workload: Workload) -> Target | None:
    if workload.device == "tcp":
        return Target(shares={"grpc": _TCP}) if workload.nbytes >= LARGE else None
    if job.model.name != "fcn5" or job.workers != 2:
        return None
    return Target(shares={"grpc": _SHM[workload.mode]})


def _grpc(job: StoreJob, rule: str, libraries: Libraries) -> list[Contender]:
    program = libraries.program(GRPC)
    if not program:
        return []
    arguments = tuple(map(str, (job.model.name, rule, job.workers, job.servers, "127.0.0.1")))
    commands = [(*program, "server", str(i), *arguments) for i in range(job.servers)]
    commands += [(*program, "worker", str(i), *arguments) for i in reversed(range(job.workers))]
    return [Contender("grpc", tuple(commands), stopped=True, servers=job.servers, environment=GRPC.environment)]
