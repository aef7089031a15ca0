"""``python -m benchmarks graph``: steps of models that are cut over workers, whose tensors cross in several variants.

A step's seconds are what the slowest worker took. Its parts come from the trace of the very steps that were timed, what
crossed from the counters of all workers meanwhile.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from benchmarks import ACTORS
from benchmarks.options import Options
from benchmarks.report import PARTS, grouped
from benchmarks.steps import parts, started, step_records, titled
from benchmarks.training import WARM
from tensorwire.bench.actors.lines import LEAVE
from tensorwire.bench.compare import Samples, Settings, Stages, Workload, asking, take_turns
from tensorwire.bench.machine import MALLOC
from tensorwire.bench.programs import Answer, Contender, ProgramFailed, actor, job
from tensorwire.bench.records import COUNTED, Record
from tensorwire.bench.show import Notes, row
from tensorwire.extras import how_to_install
from tensorwire.trace.parts import read_trace

ALONE = "one process"
REHEARSAL = "rehearsal"  # the word of a round that is not timed
REHEARSED = 4  # steps, in which graphs are captured, plans are made, and memory is registered
MOST_WORKERS = {"lstm": 2, "gru": 2}
# What is counted in a step, and how people read it. Of the first three zerocopy has none.
COUNTS = {
    "copies": "copies",
    "registrations": "registrations",
    "rpcs": "RPCs",
    "messages": "messages",
    "bytes": "bytes written",
    "mapped_bytes": "bytes mapped",
    "copied_bytes": "bytes copied",
}
NOTHING = tuple(COUNTS)[:3]
EXPOSED = 0.03  # of a step: what communication may cost GPT-2 small over two workers on shm
ROOM = 2.0  # what a job may take of memory for each byte that one process took


class CutNote(NamedTuple):
    """Of one workload besides its figures: where it was cut, and whose losses are the same."""

    workload: str
    cut: str
    same: str


def measure(options: Options, settings: Settings, notes: Notes, cuts: list[CutNote]) -> list[Record]:
    """Every workload over every device; adds to ``cuts``."""
    if "rpc" in options.modes and find_spec("grpc") is None:
        notes.skip(f"rpc needs grpcio: {how_to_install('benchmarks')}")
        options = replace(options, modes=tuple(mode for mode in options.modes if mode != "rpc"))
    found: list[Record] = []
    for workload in options.workloads:
        if options.workers > MOST_WORKERS.get(workload, options.workers):
            notes.skip(f"{workload} can be cut over {MOST_WORKERS[workload]} workers")
            continue
        for device in options.devices:
            found += contest(workload, device, options, settings, notes, cuts)
    return found


def contest(
    workload: str, device: str, options: Options, settings: Settings, notes: Notes, cuts: list[CutNote]
) -> list[Record]:
    """One workload over one device: a record of one process, and one a mode. Raises `ProgramFailed`."""
    with tempfile.TemporaryDirectory(prefix="tensorwire-bench-") as folder:
        contenders = {
            name: contender(name, workload, device, options, f"{folder}/{name}") for name in (ALONE, *options.modes)
        }
        answers, facts = run(contenders, f"{workload} over {device}", options, settings, notes)
        traces = {name: parts(read_trace(f"{folder}/{name}")) for name in answers if name != ALONE}
    losses = {name: [loss_of(told) for told in rounds] for name, rounds in answers.items()}
    shrink, size = options.shrink, facts[ALONE]["batch"]
    name = f"{titled(workload, shrink)}, batch {size}, {options.workers} workers, {device}"
    cuts.append(CutNote(name, next((f["cut"] for f in facts.values() if f["cut"]), ""), same(losses)))
    shape = Workload("graph", device, name, facts[ALONE]["nbytes"], "training-step", (), (ALONE,))
    alone = Samples.of(answers[ALONE], 0, options.steps).median

    def details(name: str, seconds: float) -> dict[str, float]:
        sums = {what: [sum(a.get(what, 0.0) for a in round) for round in answers[name]] for what in COUNTS}
        most = {what: max(counted) / options.steps for what, counted in sums.items()}
        found = {"loss": losses[name][-1], "samples_per_second": size / seconds, **most}
        if name == ALONE:
            return found | {"step": seconds, "compute": seconds} | dict.fromkeys((*PARTS[1:], "hidden"), 0.0)
        return found | {"overhead": seconds / alone - 1, **traces[name]}

    aimed = shrink == 1 and (workload, device, options.workers) == ("gpt2", "shm", 2)
    made = step_records(shape, answers, 0, options.steps, details)  # counts are those of timed steps
    return [judged(record, aimed=aimed) if record.peer == "zerocopy" else record for record in made]


def contender(name: str, workload: str, device: str, options: Options, folder: str) -> Contender:
    """The workers of a mode, and the coordinator of their job; or one process. ``folder``: for their traces."""
    alone = name == ALONE
    environment = {**MALLOC, **({} if alone else {"TENSORWIRE_TRACE": folder})}
    words = ("alone" if alone else name, workload, options.shrink, device)
    workers = 1 if alone else options.workers
    program = actor("graph", ACTORS)
    return job(name, program, *words, workers=workers, environment=environment, servers=int(not alone), together=True)


def run(
    contenders: Mapping[str, Contender], label: str, options: Options, settings: Settings, notes: Notes
) -> tuple[dict[str, list[list[Answer]]], dict[str, Any]]:
    """Starts all of them, has them take turns, and leave; what they answer, and the facts of each."""
    room, rehearse = dict.fromkeys(options.modes, ROOM), asking(REHEARSED, 1, REHEARSAL)
    steps = asking(WARM, options.steps)
    with Stages(settings.cores) as stages:
        ready = started(stages, contenders, rehearse, room, ALONE, label=label, notes=notes, peers=())
        answers = take_turns(stages, ready, settings.rounds, steps, label=label, notes=notes, peers=())
        for name in answers:
            stages.get(ready[name]).run(0, 0, LEAVE)
        # A worker's line has its facts, as JSON; the last one is that of worker 0.
        return answers, {name: json.loads(stages.get(ready[name]).lines[-1]) for name in answers}


def loss_of(answers: Sequence[Answer]) -> float:
    """Of a round. Raises `ProgramFailed` if workers have other losses than others."""
    losses = {answer["loss"] for answer in answers if "loss" in answer}
    if len(losses) > 1:
        raise ProgramFailed(f"workers have different losses of one step: {sorted(losses)}")
    return losses.pop()


def same(losses: Mapping[str, Sequence[float]]) -> str:
    """Says whose losses are the same, bit for bit, in every round: all. Raises `ProgramFailed` if they are not."""
    (first, wanted), *others = losses.items()
    for name, found in others:
        for number, (loss, right) in enumerate(zip(found, wanted, strict=True), 1):
            if loss != right:
                raise ProgramFailed(f"round {number}: the loss is {loss!r} with {name}, but {right!r} with {first}")
    return ", ".join(losses)


def judged(record: Record, *, aimed: bool) -> Record:
    """``record`` with what it is to reach. ``aimed``: exposed communication, too."""
    details = record.details or {}
    target, met = COUNTED, not any(details[name] for name in NOTHING)
    if aimed:
        target += f"; exposed <= {EXPOSED:.0%}"
        met = met and details["exposed"] <= EXPOSED * details["step"]
    return replace(record, target=target, met=met)


# ---- what is shown besides the table of figures

STEP_TITLE = "Where a step's time went, the mean of the workers (overhead: over one process)"
CROSSED_TITLE = "What crossed in a step, all workers together"
CROSSED_HEAD = ("what", "who", *COUNTS.values(), "target", "")
CUT_TITLE = "Where the models are cut, and whose losses are the same, bit for bit"
CUT_HEAD = ("what", "cut", "the same losses")


def crossed_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """A row a record of what was counted."""
    rows = []
    for what, record in grouped(records):
        details = record.details or {}
        cells = [f"{details[name]:,.2f}".removesuffix(".00") for name in COUNTS]
        rows.append((what, record.peer, *cells, *row(record)[7:]))
    return rows
