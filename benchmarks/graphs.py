"""``python -m benchmarks graph``: steps of models that are cut over workers, whose tensors cross in several variants.

A step's seconds are what the slowest worker took. Its parts come from the trace of the very steps that were timed, what
crossed from the counters of all workers meanwhile.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from benchmarks import huggingface
from benchmarks.training import WARM, Course, parts
from benchmarks.workers import Setup, Variant, Workers
from tensorwire._native import available_bytes
from tensorwire.bench import models
from tensorwire.bench.compare import Samples, Workload, records
from tensorwire.bench.programs import Answer, ProgramFailed
from tensorwire.bench.records import COUNTED, Record
from tensorwire.bench.show import Notes
from tensorwire.extras import how_to_install
from tensorwire.sizes import size_text

MODES = ("zerocopy", "copy", "rpc")
MODELS = {**models.MODELS, **huggingface.MODELS}
ALONE = "one process"
ACTOR = "benchmarks.actors.graph"
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


@dataclass
class Outcome:
    """What one variant showed: seconds and losses by round, facts of the model, the parts of the typical step.

    ``samples.counts``: of a step, all workers together, in the round that had most.
    """

    samples: Samples = field(default_factory=Samples)
    losses: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, answers: Sequence[Answer], course: Course) -> None:
        """One round's answers. Raises `ProgramFailed` if workers have other losses than others."""
        self.samples.seconds.append(max(a["seconds"] for a in answers) / course.steps)
        losses = {a["loss"] for a in answers}
        if len(losses) > 1:
            raise ProgramFailed(f"workers have different losses of one step: {sorted(losses)}")
        self.losses += losses
        counts = self.samples.counts
        for name in COUNTS:
            counts[name] = max(counts.get(name, 0.0), sum(a[name] for a in answers) / course.steps)


@dataclass(frozen=True)
class CutNote:
    """Of one workload besides its figures: where it was cut, and whose losses are the same."""

    workload: str
    cut: str
    same: str


def measure(
    workloads: Sequence[str], devices: Sequence[str], made: dict[str, Any], cuts: list[CutNote], notes: Notes
) -> list[Record]:
    """Every workload over every device; adds to ``cuts``. ``made``: the rest of what `contest` takes."""
    if "rpc" in made["modes"] and find_spec("grpc") is None:
        notes.skip(f"rpc needs grpcio: {how_to_install('benchmarks')}")
        made = {**made, "modes": [mode for mode in made["modes"] if mode != "rpc"]}
    found: list[Record] = []
    for workload in workloads:
        if workload in huggingface.MODELS and find_spec("transformers") is None:
            notes.skip(f"{workload} needs transformers: pip install transformers")
            continue
        if made["workers"] > MOST_WORKERS.get(workload, made["workers"]):
            notes.skip(f"{workload} can be cut over {MOST_WORKERS[workload]} workers")
            continue
        for device in devices:
            found += contest(workload, device, cuts=cuts, notes=notes, **made)
    return found


def contest(
    workload: str,
    device: str,
    *,
    workers: int,
    modes: Sequence[str],
    course: Course,
    cuts: list[CutNote],
    notes: Notes,
    shrink: int = 1,
) -> list[Record]:
    """One workload over one device: a record of one process, and one a mode. Raises `ProgramFailed`."""
    variants = {ALONE: Variant(ALONE, "alone", actor=ACTOR)}
    variants |= {mode: Variant(mode, mode, device, actor=ACTOR) for mode in modes}
    setups = {name: Setup(workload, 1 if name == ALONE else workers, 0, shrink) for name in variants}
    outcomes = run(variants, setups, course, f"{workload} over {device}", notes)
    facts = outcomes[ALONE].facts
    title = MODELS[workload].title
    name = f"{title}{f' / {shrink}' if shrink > 1 else ''}, batch {facts['batch']}, {workers} workers, {device}"
    cuts.append(CutNote(name, next((o.facts["cut"] for o in outcomes.values() if o.facts["cut"]), ""), same(outcomes)))
    shape = Workload("graph", device, name, facts["nbytes"], "training-step", (), (ALONE,))
    made = records(shape, {name: o.samples for name, o in outcomes.items()}, {name: name for name in outcomes})
    aimed = shrink == 1 and (workload, device, workers) == ("gpt2", "shm", 2)
    return [_detailed(record, outcomes, aimed=aimed) for record in made]


def run(
    variants: dict[str, Variant], setups: dict[str, Setup], course: Course, about: str, notes: Notes
) -> dict[str, Outcome]:
    """Starts all of them, has them take turns, and ends them. Who does not fit into memory is left out."""
    outcomes: dict[str, Outcome] = {}
    with contextlib.ExitStack() as stack:
        jobs: dict[str, Workers] = {}
        needed = 0
        for name, variant in variants.items():
            notes.progress(f"{about}: starting {name}")
            before = available_bytes()
            if before < needed:
                notes.skip(f"{about}: {name} may take {size_text(needed)} of memory, and {size_text(before)} are left")
                continue
            job = jobs[name] = stack.enter_context(Workers(variant, setups[name]))
            job.run(REHEARSED, 1, REHEARSAL)
            outcomes[name] = Outcome(facts=json.loads(job.first_lines[0]))
            needed = needed or round(ROOM * max(0, before - available_bytes()))
        names = list(jobs)
        for number in range(course.rounds):
            at = number % len(names)  # nobody is always the first after a pause
            for name in names[at:] + names[:at]:
                notes.progress(f"{about}: round {number + 1} of {course.rounds}: {name}")
                outcomes[name].add(jobs[name].run(WARM, course.steps), course)
        for name, outcome in outcomes.items():
            trace = jobs[name].finish()
            outcome.parts = parts(trace) if trace else {}
    return outcomes


def same(outcomes: Mapping[str, Outcome]) -> str:
    """Says whose losses are the same, bit for bit, in every round: all. Raises `ProgramFailed` if they are not."""
    (first, wanted), *others = outcomes.items()
    for name, outcome in others:
        for number, (loss, right) in enumerate(zip(outcome.losses, wanted.losses, strict=True), 1):
            if loss != right:
                raise ProgramFailed(f"round {number}: the loss is {loss!r} with {name}, but {right!r} with {first}")
    return ", ".join(outcomes)


def _detailed(record: Record, outcomes: Mapping[str, Outcome], *, aimed: bool) -> Record:
    """``record`` with its details, and with what it is to reach where it is ``zerocopy``."""
    outcome = outcomes[record.peer]
    seconds = record.seconds
    details = {"loss": outcome.losses[-1], "samples_per_second": outcome.facts["batch"] / seconds}
    if record.peer == ALONE:
        details |= {"step": seconds, "compute": seconds, "update": 0.0, "exposed": 0.0, "idle": 0.0, "hidden": 0.0}
    else:
        details |= {"overhead": seconds / outcomes[ALONE].samples.median - 1, **outcome.parts}
    details |= {name: outcome.samples.counts[name] for name in COUNTS}
    record = replace(record, details=details, bytes_per_second=None)  # of a step, bytes a second say nothing
    if record.peer != "zerocopy":
        return record
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
    before = ""
    for record in records:
        what, before = ("" if record.workload == before else record.workload), record.workload
        details = record.details or {}
        cells = [f"{details[name]:,.2f}".removesuffix(".00") for name in COUNTS]
        verdict = "" if record.met is None else ("met" if record.met else "MISSED")
        rows.append((what, record.peer, *cells, record.target or "", verdict))
    return rows


def cut_rows(cuts: Sequence[CutNote]) -> list[tuple[str, ...]]:
    """A row a workload."""
    return [(one.workload, one.cut, one.same) for one in cuts]
