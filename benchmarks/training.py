"""``python -m benchmarks train``: whole steps of training, the variants to train taking turns.

A step's seconds are what the slowest worker took. Where the store is Tensorwire's, its parts come from the trace of
the very steps that were timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks import ACTORS, links
from benchmarks.links import Places
from benchmarks.options import Options
from benchmarks.sleeping_layers import MODELS, SLEEPING
from benchmarks.steps import Answers, check_losses, mean, parts, started, step_records
from tensorwire.bench.actors.lines import LEAVE
from tensorwire.bench.compare import Settings, Stages, Workload, asking, take_turns
from tensorwire.bench.machine import MALLOC
from tensorwire.bench.programs import HERE, OURS, Answer, Contender, actor, job
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes
from tensorwire.errors import ArgumentError
from tensorwire.trace.parts import read_trace

NO_STORE, COMPUTE, OVERLAP = "no store", "compute alone", f"{OURS}, overlap"
DDP = "DDP, gloo"
KINDS = {NO_STORE: "alone", COMPUTE: "compute", OURS: "store", OVERLAP: "overlap", DDP: "ddp"}
PEERS = (DDP,)
SERVED = (OURS, OVERLAP)  # they have servers, and write a trace
# Who is left out where memory is short: what one takes for each byte that the store without overlap took, and a margin.
ROOM = {OVERLAP: 1.5, DDP: 1.25}
REHEARSAL = "0"  # seconds that layers sleep while it is found out how long they are to
WARM = 1  # steps of a round that nobody times
# What the figures are to reach: exposed communication as a share of a step, and the share that overlap hides.
EXPOSED, HIDDEN = 0.10, 0.80


def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """Every workload over every device, or over tcp on every link."""
    if options.links and options.devices != ("tcp",):
        raise ArgumentError("--link measures tcp: give --device tcp")

    def over(rate: str, places: Places) -> list[Record]:
        pairs = [(name, device) for name in options.workloads for device in options.devices]
        return [r for pair in pairs for r in contest(*pair, rate, places, options, settings, notes)]

    return links.over_each(options.links, notes, over) if options.links else over("", HERE)


def contest(
    workload: str, device: str, rate: str, places: Places, options: Options, settings: Settings, notes: Notes
) -> list[Record]:
    """One workload over one device: a record a variant. Raises `ProgramFailed` if Tensorwire's own fails."""
    with tempfile.TemporaryDirectory(prefix="tensorwire-bench-") as folder:
        contenders = {
            name: contender(name, workload, device, places, options, f"{folder}/{name}")
            for name in variants(workload, options)
        }
        answers = run(contenders, workload, f"{workload} over {rate or device}", options, settings, notes)
        traces = {name: parts(read_trace(f"{folder}/{name}")) for name in answers if name in SERVED}
    together = {name: mean(rounds[-1], "loss") for name, rounds in answers.items() if name not in (NO_STORE, COMPUTE)}
    check_losses(workload, together)
    model, shrink = MODELS[workload], options.shrink
    size = sum(a.get("samples", 0) for a in answers[OURS][-1])
    place = f"tcp over a link of {rate}" if rate else device
    title = f"{model.title}{f' / {shrink}' if shrink > 1 else ''}, batch {options.workers} x {size / options.workers:g}"
    limits, nbytes = (COMPUTE, NO_STORE), model.nbytes if shrink == 1 else 0
    shape = Workload("train", device, f"{title}, {place}", nbytes, "training-step", (), limits)

    def details(name: str, seconds: float) -> dict[str, float]:
        return {
            "loss": mean(answers[name][-1], "loss"),
            "samples_per_second": size / seconds,
            **traces.get(name, {}),
        }

    made = {r.peer: r for r in step_records(shape, answers, WARM, options.steps, details)}
    aimed = shrink == 1 and (workload, device) in (("fcn5", "shm"), (SLEEPING, "tcp"))
    compared = [beside(record, made) for record in made.values()]
    return [judged(record, made) for record in compared] if aimed else compared


def variants(workload: str, options: Options) -> list[str]:
    """Who takes part; the first has no store."""
    stores = [OURS, *([OVERLAP] if options.overlap else [])]
    if workload == SLEEPING:
        return [COMPUTE, *stores]
    return [NO_STORE, *stores, *(name for name in PEERS if KINDS[name] in options.peers)]


def contender(name: str, workload: str, device: str, places: Places, options: Options, folder: str) -> Contender:
    """The programs of a variant; ``folder``: for its trace, and where the workers of DDP meet."""
    kind, servers = KINDS[name], options.servers if name in SERVED else 0
    environment = {
        **MALLOC,
        "GLOO_SOCKET_IFNAME": "lo" if places == HERE else "cable",  # else it takes the one of the machine's name
        **({"TENSORWIRE_TRACE": folder} if servers else {}),
    }
    Path(folder).mkdir()
    return job(
        name,
        actor("train", ACTORS),
        *(kind, workload, options.shrink, f"{folder}/meeting", device),
        workers=options.workers,
        servers=servers,
        places=places,
        environment=environment,
        together=True,
    )


def run(
    contenders: Mapping[str, Contender], workload: str, label: str, options: Options, settings: Settings, notes: Notes
) -> dict[str, list[list[Answer]]]:
    """Starts all of them, has them take turns, and leave."""
    steps, rehearse = asking(WARM, options.steps), asking(2, 1, REHEARSAL)  # after which it has all its memory
    with Stages(settings.cores) as stages:
        ready = started(stages, contenders, rehearse, ROOM, OURS, label=label, notes=notes, peers=PEERS)
        if workload == SLEEPING:
            awake = asking(WARM, options.steps, REHEARSAL)
            took = take_turns(stages, ready, 1, awake, label=label, notes=notes, peers=PEERS)
            steps = asking(WARM, options.steps, sleep(took, options.steps))
        answers = take_turns(stages, ready, settings.rounds, steps, label=label, notes=notes, peers=PEERS)
        for name in answers:
            stages.get(ready[name]).run(0, 0, LEAVE)
    return answers


def sleep(took: Answers, steps: int) -> str:
    """How long a step's computation is to take: as long as its communication does without overlap."""
    seconds = {name: max(a["seconds"] for a in rounds[0]) / steps for name, rounds in took.items()}
    return str(max(seconds[OURS] - seconds[COMPUTE], 0.001))


def beside(record: Record, made: Mapping[str, Record]) -> Record:
    """``record`` with what a step costs beyond computation, and what of that overlap hides."""
    details = dict(record.details or {})
    for without in (NO_STORE, COMPUTE):
        if without in made and record.peer != without:
            details["overhead"] = record.seconds / made[without].seconds - 1
    if record.peer == OVERLAP and COMPUTE in made:
        compute = made[COMPUTE].seconds
        details["hidden_share"] = 1 - (record.seconds - compute) / (made[OURS].seconds - compute)
    return replace(record, details=details)


def judged(record: Record, made: Mapping[str, Record]) -> Record:
    """``record`` with what it is to reach."""
    details = record.details or {}
    if "hidden_share" in details:
        return replace(record, target=f"hides >= {HIDDEN:.0%}", met=details["hidden_share"] >= HIDDEN)
    if record.peer != OURS or COMPUTE in made:
        return record
    target, met = f"exposed <= {EXPOSED:.0%}", details["exposed"] <= EXPOSED * details["step"]
    if DDP in made:
        target, met = f"{target}, ahead of DDP", met and record.seconds < made[DDP].seconds
    return replace(record, target=target, met=met)
