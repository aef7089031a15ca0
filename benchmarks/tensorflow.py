"""``python -m benchmarks tensorflow``: tensors that cross between two workers, by TensorFlow's own runtime and by ours.

One chain of additions runs on both, each on the other worker than the one before it. The figure is the time of one
crossing and one addition: within a call of many crossings, and of a call of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.libraries import PROGRAMS, framework_python
from benchmarks.options import Options
from tensorwire.bench.compare import Settings, Workload, compare_all
from tensorwire.bench.programs import OURS, Contender
from tensorwire.bench.records import Record, Target
from tensorwire.bench.show import Notes
from tensorwire.sizes import size_text

OWN = "grpc"
ARENA = f"{OURS}, arena"
MANY, SINGLE, ADDITIONS = "crossing-in-a-call", "crossing-per-call", "addition"
TRANSFER = 25.0  # least ratio of the transfer alone, with the arena
MIB = 2**20
SIZES = (64, 65536, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
QUICK_SIZES = (64, MIB)
# Least ratios to TensorFlow's own runtime, by device: up to so many bytes.
TARGETS = {"shm": ((65536, 3.0), (MIB, 4.0), (64 * MIB, 6.0)), "tcp": ((MIB, 1.5), (256 * MIB, 2.0))}


def find_python() -> str:
    """The Python that has TensorFlow. Raises `MissingPackage`."""
    return framework_python("TensorFlow", "tensorflow")


def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """All sizes over each device. Raises `MissingPackage`."""
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    made = compare_all(list(workloads(find_python(), options.devices, sizes, quick=options.quick)), settings, notes)
    return made + transfers(made)


def workloads(python: str, devices: Sequence[str], sizes: Sequence[int], *, quick: bool) -> Iterator[Workload]:
    """Each size within a call of many crossings, and in a call of its own; and the additions alone."""
    for nbytes in sizes:
        # Each crossing of a call has an edge of its own, with slots for two tensors.
        many = 2 if nbytes > 64 * MIB else 10 if quick or nbytes > 4 * MIB else 50
        for device in devices:
            names = (OURS, ARENA, OWN) if device == "shm" else (OURS, OWN)
            for mode, crossings in ((MANY, many), (SINGLE, 2), (ADDITIONS, many)):
                alone = mode == ADDITIONS
                if alone and device != "shm":
                    continue
                # TensorFlow's session computes such a chain once and for all, so ours counts for both.
                some = tuple(name for name in names if name != OWN) if alone else names
                what = f"{crossings} additions alone" if alone else f"{crossings} crossings in a call"
                word = f"{nbytes}x{crossings}" + "x" * alone
                yield Workload(
                    "tensorflow",
                    device,
                    f"{device}, TensorFlow, {size_text(nbytes)}, {what}",
                    nbytes,
                    mode,
                    tuple(_contender(python, name, device, word, nbytes) for name in some),
                    (OWN,),
                    _target(device, nbytes) if mode == MANY else None,
                    per=crossings,
                    stage="tensorflow",
                )


def transfers(made: Sequence[Record]) -> list[Record]:
    """Of each crossing over shm, what is left of it without its addition, beside TensorFlow's own."""
    additions = {(r.bytes, r.peer): r.seconds for r in made if r.mode == ADDITIONS}
    found = []
    for record in made:
        own = next((r for r in made if r.mode == MANY and r.workload == record.workload and r.peer == OWN), None)
        if record.mode != MANY or record.device != "shm" or own is None:
            continue
        addition = additions[record.bytes, OURS if record.peer == OWN else record.peer]
        seconds = max(record.seconds - addition, 1e-9)
        limit = max(own.seconds - additions[own.bytes, OURS], 1e-9)
        judged = record.peer == ARENA and record.bytes >= MIB
        found.append(
            replace(
                record,
                workload=f"{record.workload}, the transfer alone",
                mode="transfer-alone",
                seconds=seconds,
                bytes_per_second=record.bytes / seconds,
                limit=None if record.peer == OWN else OWN,
                limit_value=None if record.peer == OWN else limit,
                ratio=None if record.peer == OWN else limit / seconds,
                target=f">= {TRANSFER:.2f} of {OWN}" if judged else None,
                met=limit / seconds >= TRANSFER if judged else None,
                low=max(min(record.low - addition, seconds), 1e-9),
                high=max(record.high - addition, seconds),
            )
        )
    return found


def _target(device: str, nbytes: int) -> Target | None:
    least = next((ratio for most, ratio in TARGETS[device] if nbytes <= most), None)
    return None if least is None else Target(shares={OWN: least})


def _contender(python: str, peer: str, device: str, word: str, nbytes: int) -> Contender:
    """The programs of worker 1 and worker 0."""
    runtime = {OURS: OURS, ARENA: "arena", OWN: OWN}[peer]
    where = "tcp" if peer == OWN else device
    made = two_workers(python, "tensorflow_crossing.py", peer, runtime, where)
    return replace(made, word=word, memory=20 * nbytes)


def two_workers(python: str, program: str, peer: str, runtime: str, where: str) -> Contender:
    """Worker 1 and worker 0 of a program; ``where``: the device, for those of Tensorwire."""
    commands = tuple((python, str(PROGRAMS / program), str(i), runtime, where) for i in (1, 0))
    return Contender(peer, commands, environment={"TENSORWIRE_SECRET": secrets.token_hex(32)})
