"""``store --part keys``: modes beside each other, small pushes, and many workers at the keys of one server."""

from __future__ import annotations

from dataclasses import replace

from benchmarks import ACTORS
from benchmarks.actors.key_pushes import LIST
from benchmarks.options import Options
from tensorwire.bench.compare import Settings, Workload, compare_all
from tensorwire.bench.programs import OURS, Contender, actor, job
from tensorwire.bench.records import Record, Target
from tensorwire.bench.show import Notes
from tensorwire.models import find
from tensorwire.sizes import counted

BYTES = 4096  # of a small push
PUSHES = 4 * LIST  # keys that are pushed to in turn: a call does not wait for the one before
SHARED = 64  # keys that several workers push to
PER_SECOND = 80_000
AS_FAST = 0.9  # of sync
_FAIR = 200  # passes of a round: percentiles need that many


def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """All of it over each device; the tensors of the models are keys of the modes."""
    made = []
    for device in options.devices:
        made += [modes(name, device, options.workers, options.servers) for name in options.workloads]
        made += pushes(device)
        made += [shared(device, count, quick=options.quick) for count in ((1, 2) if options.quick else (1, 2, 4, 8))]
    return compare_all(made, settings, notes)


def contender(
    name: str, keys: str, mode: str, device: str, *, workers: int, servers: int = 1, word: str = "", memory: int = 0
) -> Contender:
    """A job with these keys."""
    program, words = actor("key_pushes", ACTORS), (keys, mode, device)
    return job(name, program, *words, workers=workers, servers=servers, word=word, memory=memory)


def modes(name: str, device: str, workers: int, servers: int) -> Workload:
    """Async and SSP beside sync."""
    model = find(name)
    memory = (1 + 2 * workers) * model.nbytes * (1 if device == "shm" else 2)
    ours = (OURS, f"{OURS}, ssp", f"{OURS}, sync")
    contenders = tuple(
        contender(who, name, mode, device, workers=workers, servers=servers, word="whole", memory=memory)
        for who, mode in zip(ours, ("async", "ssp", "sync"), strict=True)
    )
    title = f"{device}, {model.title} as {len(model.tensors)} keys, rule sum, {workers} workers, async"
    target = Target(shares={ours[2]: AS_FAST}) if device == "shm" else None
    return Workload("store", device, title, model.nbytes, "pushpull", contenders, (ours[2],), target)


def pushes(device: str) -> list[Workload]:
    """Small pushes of one worker: 64 per call, then one."""
    ours = contender(OURS, f"{PUSHES}x{BYTES}", "async", device, workers=1)
    made = []
    for word, per in (("list", LIST), ("one", 1)):
        title = f"{device}, pushes of 4 KiB, rule sum, 1 worker, async, {per} per call"
        target = Target(1 / PER_SECOND) if (device, word) == ("shm", "list") else None
        worded = replace(ours, word=word)
        made.append(Workload("store", device, title, BYTES, f"push-{word}", (worded,), target=target, per=per))
    return made


def shared(device: str, workers: int, *, quick: bool) -> Workload:
    """Workers that push to the same keys of one server."""
    ours = contender(OURS, f"{SHARED}x{BYTES}", "async", device, workers=workers, word="turns")
    title = f"{device}, {SHARED} keys of 4 KiB, {counted(workers, 'worker')}, one server"
    least = 5 if quick else _FAIR
    target = Target({"shm": 25e-6, "tcp": 60e-6}[device]) if workers == 1 else None
    return Workload("store", device, title, BYTES, "push-to-answer", (ours,), target=target, per=SHARED, least=least)
