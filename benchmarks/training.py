"""``python -m benchmarks train``: whole steps of training, the variants to train taking turns.

A step's seconds are what the slowest worker took. Where the store is Tensorwire's, its parts come from the trace of
the very steps that were timed.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from benchmarks.libraries import PEERS as LIBRARIES
from benchmarks.sleeping_layers import MODELS, SLEEPING
from benchmarks.workers import Setup, Variant, Workers
from tensorwire._native import available_bytes
from tensorwire.bench.compare import Samples, Workload, records
from tensorwire.bench.links import cable
from tensorwire.bench.programs import OURS, Answer, ProgramFailed
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.sizes import size_text
from tensorwire.trace.parts import ProcessTrace, parts_of_trace, typical

PEERS = ("ddp", "grpc")
# Who is left out where memory is short: what one takes for each byte that the store without overlap took, and a margin.
ROOM = {"overlap": 1.5, "ddp": 1.25, "grpc": 2.5}
NO_STORE, COMPUTE, OVERLAP = "no store", "compute alone", f"{OURS}, overlap"
DDP, GRPC = "DDP, gloo", "gRPC store"
REHEARSAL = "0"  # seconds that layers sleep while it is found out how long they are to
WARM = 1  # steps of a round that nobody times
# What the figures are to reach: exposed communication as a share of a step, losses, the share that overlap hides.
EXPOSED, SAME_LOSS, HIDDEN = 0.10, 1e-4, 0.80
QUICK_SHRINK = 16


@dataclass(frozen=True)
class Course:
    """How long: ``rounds`` of ``steps`` for each variant, taking turns."""

    rounds: int
    steps: int


@dataclass
class Outcome:
    """What one variant showed: seconds of a step by round, the last losses of its workers, the trace of its job."""

    samples: Samples = field(default_factory=Samples)
    loss: float = 0.0
    size: float = 0.0
    trace: Mapping[str, ProcessTrace] = field(default_factory=dict)

    def add(self, answers: Sequence[Answer], course: Course) -> None:
        """One round's answers."""
        self.samples.add(answers, WARM, course.steps, 1)
        self.loss = statistics.fmean(a["loss"] for a in answers)
        self.size = sum(a["samples"] for a in answers)

    @property
    def seconds(self) -> float:
        """A step's, the median of the rounds."""
        return self.samples.median


def variants(workload: str, device: str, peers: Iterable[str], *, overlap: bool) -> list[Variant]:
    """Who takes part; the first has no store."""
    stores = [Variant(OURS, "store", device)] + ([Variant(OVERLAP, "overlap", device)] if overlap else [])
    if workload == SLEEPING:
        return [Variant(COMPUTE, "compute"), *stores]
    others = [Variant(name, kind) for name, kind in ((DDP, "ddp"), (GRPC, "grpc")) if kind in peers]
    return [Variant(NO_STORE, "alone"), *stores, *others]


def measure(
    workloads: Sequence[str], devices: Sequence[str], links: Sequence[str], made: Mapping[str, Any], notes: Notes
) -> list[Record]:
    """Every workload over every device, or over tcp on every link. ``made``: the rest of what `contest` takes."""
    if "grpc" in made["peers"] and find_spec("grpc") is None:
        notes.skip(f"grpc is not here: {LIBRARIES['grpc'].install}")
        made = {**made, "peers": [peer for peer in made["peers"] if peer != "grpc"]}
    found: list[Record] = []
    for workload in workloads:
        for rate in links:
            try:
                with cable(rate) as ends:
                    found += contest(workload, "tcp", rate=rate, ends=ends, notes=notes, **made)
            except Unsupported as error:
                notes.skip(f"--link {rate}: {error}")
        for device in () if links else devices:
            found += contest(workload, device, notes=notes, **made)
    return found


def contest(
    workload: str,
    device: str,
    *,
    workers: int,
    servers: int,
    peers: Iterable[str],
    overlap: bool,
    course: Course,
    notes: Notes,
    shrink: int = 1,
    rate: str = "",
    ends: tuple[str, ...] = (),
) -> list[Record]:
    """One workload over one device: a record a variant. Raises `ProgramFailed` if Tensorwire's own fails."""
    setup = Setup(workload, workers, servers, shrink, ends)
    label = f"{workload} over {rate or device}"
    outcomes = run(variants(workload, device, peers, overlap=overlap), setup, course, label, notes)
    check_losses(workload, outcomes, notes)
    size = next(iter(outcomes.values())).size
    model = MODELS[workload]
    place = f"tcp over a link of {rate}" if rate else device
    name = f"{model.title}{f' / {shrink}' if shrink > 1 else ''}, batch {workers} x {size / workers:g}, {place}"
    limits = (COMPUTE, NO_STORE)
    shape = Workload("train", device, name, model.nbytes if shrink == 1 else 0, "training-step", (), limits)
    made = records(shape, {name: o.samples for name, o in outcomes.items()}, {name: name for name in outcomes})
    aimed = shrink == 1 and (workload, device) in (("fcn5", "shm"), (SLEEPING, "tcp"))
    return [_detailed(record, outcomes, aimed=aimed) for record in made]


def run(variants: Sequence[Variant], setup: Setup, course: Course, label: str, notes: Notes) -> dict[str, Outcome]:
    """Starts all of them, has them take turns, and ends them. Who fails and is not ours is left out, and who does not
    fit into memory beside the others."""
    outcomes: dict[str, Outcome] = {}
    with contextlib.ExitStack() as stack:
        jobs: dict[str, Workers] = {}
        ours = 0  # bytes that the store without overlap took
        for variant in variants:
            notes.progress(f"{label}: starting {variant.name}")
            before, needed = available_bytes(), round(ROOM.get(variant.kind, 0) * ours)
            if before < needed:
                notes.skip(
                    f"{label}: {variant.name} may take {size_text(needed)} of memory, and {size_text(before)} are left"
                )
                continue
            with _tolerated(variant, notes):
                job = stack.enter_context(Workers(variant, setup))
                job.run(2, 1, REHEARSAL)  # now it has all its memory
                jobs[variant.name], outcomes[variant.name] = job, Outcome()
            if variant.name == OURS:
                ours = before - available_bytes()
        word = _sleep(jobs, course) if setup.workload == SLEEPING else ""
        for number in range(course.rounds):
            names = list(outcomes)
            at = number % len(names)  # nobody is always the first after a pause
            for name in names[at:] + names[:at]:
                notes.progress(f"{label}: round {number + 1} of {course.rounds}: {name}")
                with _tolerated(jobs[name].variant, notes, outcomes):
                    outcomes[name].add(jobs[name].run(WARM, course.steps, word), course)
        for name, outcome in outcomes.items():
            outcome.trace = jobs[name].finish()
    return outcomes


@contextlib.contextmanager
def _tolerated(variant: Variant, notes: Notes, outcomes: dict[str, Outcome] | None = None) -> Iterator[None]:
    try:
        yield
    except ProgramFailed as error:
        if variant.kind not in PEERS:
            raise
        notes.skip(f"{variant.name}: {error}")
        (outcomes or {}).pop(variant.name, None)


def _sleep(jobs: Mapping[str, Workers], course: Course) -> str:
    """How long a step's computation is to take: as long as its communication does without overlap."""
    took = {}
    for name in (COMPUTE, OURS):
        answers = jobs[name].run(WARM, course.steps, REHEARSAL)
        took[name] = max(a["seconds"] for a in answers) / course.steps
    return str(max(took[OURS] - took[COMPUTE], 0.001))


def check_losses(workload: str, outcomes: Mapping[str, Outcome], notes: Notes) -> None:
    """Who trains together on the same batches has the same loss, up to rounding: sums in another order.

    Raises `ProgramFailed` where they differ by more than 1e-4 of it.
    """
    together = {name: o.loss for name, o in outcomes.items() if name not in (NO_STORE, COMPUTE)}
    wanted = together[OURS]
    for name, loss in together.items():
        if not abs(loss - wanted) <= SAME_LOSS * max(1.0, abs(wanted)):
            raise ProgramFailed(f"{workload}: the loss is {wanted:.6g} with {OURS}, but {loss:.6g} with {name}")


# ---- what is shown of a step


def parts(trace: Mapping[str, ProcessTrace]) -> dict[str, float]:
    """The typical timed step, whole and in parts, in seconds."""
    timed = {int(name.removeprefix("worker-")): _timed(t) for name, t in trace.items() if name.startswith("worker-")}
    found = typical((p for p in parts_of_trace(trace) if p.step in timed[p.worker]), skip=0)
    names = ("compute", "update", "exposed", "idle", "hidden")
    return {"step": found.seconds, **{name: getattr(found, name) for name in names if hasattr(found, name)}}


def _timed(trace: ProcessTrace) -> set[int]:
    """The steps that lie in the timed parts of rounds; in the others, workers waited for the bench."""
    intervals: Any = trace.facts["timed"]
    computed = [(span[1], span[3]) for span in trace.spans if span[0] == "compute"]
    return {step for step, stop in computed if any(start < stop < end for start, end in intervals)}


def _detailed(record: Record, outcomes: Mapping[str, Outcome], *, aimed: bool) -> Record:
    """``record`` with its details, and with what it is to reach where there is such an aim."""
    outcome = outcomes[record.peer]
    details = {"loss": outcome.loss, "samples_per_second": outcome.size / outcome.seconds}
    for without in (NO_STORE, COMPUTE):
        if without in outcomes and record.peer != without:
            details["overhead"] = outcome.seconds / outcomes[without].seconds - 1
    if outcome.trace:
        details |= parts(outcome.trace)
    if record.peer == OVERLAP and COMPUTE in outcomes:
        compute = outcomes[COMPUTE].seconds
        details["hidden_share"] = 1 - (outcome.seconds - compute) / (outcomes[OURS].seconds - compute)
    record = replace(record, details=details, bytes_per_second=None)  # of a step, bytes a second say nothing
    return _judged(record, outcomes) if aimed else record


def _judged(record: Record, outcomes: Mapping[str, Outcome]) -> Record:
    details = record.details or {}
    if "hidden_share" in details:
        return replace(record, target=f"hides >= {HIDDEN:.0%}", met=details["hidden_share"] >= HIDDEN)
    if record.peer != OURS or COMPUTE in outcomes:
        return record
    target, met = f"exposed <= {EXPOSED:.0%}", details["exposed"] <= EXPOSED * details["step"]
    if DDP in outcomes:
        target, met = f"{target}, ahead of DDP", met and record.seconds < outcomes[DDP].seconds
    return replace(record, target=target, met=met)


def check(workloads: Sequence[str], devices: Sequence[str], links: Sequence[str]) -> None:
    """Raises `ArgumentError` for what does not go together."""
    if links and devices != ("tcp",):
        raise ArgumentError("--link measures tcp: give --device tcp")
