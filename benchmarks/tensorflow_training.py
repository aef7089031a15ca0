"""``python -m benchmarks tensorflow --part networks``: whole steps of training over gRPC and over our edges.

Three things are timed in turns, with each runtime: a step; the same computation in one process; and the crossings of a
step without computation. From these come the parts of a step, by one definition for both runtimes; a worker's, on
average over the two:

- *compute*: half of what one process takes, since two share it.
- *exposed* communication: what a step takes longer than one process.
- *idle*: the rest of the step, in which the other worker computes.
- *hidden* communication: what the crossings take by themselves, less what is exposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.tensorflow import OWN, find_python, two_workers
from benchmarks.training import Course
from tensorwire.bench.compare import Samples, Workload, records
from tensorwire.bench.models import MODELS
from tensorwire.bench.programs import OURS, Contender, ProgramFailed, Stage
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes

TITLE = "Where a worker's step went, on average"
SAME_LOSS = 1e-5
STEP, COMPUTE, TRANSFER = "step", "compute", "transfer"
SERVERS, HALVES = "servers", "halves"
TITLES = {SERVERS: "variables on worker 1", HALVES: "cut in two"}
# Samples of a step: as for other benchmarks, and few where what crosses grows with them.
SIZES = {
    SERVERS: {"alexnet": 8, "inception": 2, "vgg16": 1, "lstm": 64, "gru": 64, "fcn5": 64},
    HALVES: {"alexnet": 2, "inception": 1, "vgg16": 1, "lstm": 8, "gru": 8, "fcn5": 8},
}
WARM = 1  # steps of a round that nobody times


@dataclass(frozen=True)
class Case:
    """One network in one placement. ``shrink`` divides its hidden sizes."""

    name: str
    placement: str
    device: str
    shrink: int

    @property
    def size(self) -> int:
        """Samples of a step."""
        return SIZES[self.placement][self.name]

    @property
    def title(self) -> str:
        """What tables call it."""
        narrow = f" / {self.shrink}" if self.shrink > 1 else ""
        return f"{MODELS[self.name].title}{narrow}, batch {self.size}, {TITLES[self.placement]}, {self.device}"

    def word(self, what: str) -> str:
        """What a program is told."""
        return f"{self.name},{self.placement},{what},{self.shrink},{self.size}"


@dataclass
class Timed:
    """What one runtime showed in a case."""

    by_what: dict[str, Samples] = field(default_factory=lambda: {what: Samples() for what in (STEP, COMPUTE, TRANSFER)})
    first: dict[str, float] = field(default_factory=dict)  # the loss of the first step, by what was timed
    losses: dict[str, list[float]] = field(default_factory=lambda: {what: [] for what in (STEP, COMPUTE, TRANSFER)})

    def parts(self) -> dict[str, float]:
        """The parts of a step in seconds."""
        return parts_of(*(self.by_what[what].median for what in (STEP, COMPUTE, TRANSFER)))


def parts_of(step: float, alone: float, crossings: float) -> dict[str, float]:
    """The parts of a worker's step, from what was timed; in seconds."""
    compute, exposed = min(alone / 2, step), max(step - alone, 0.0)
    return {
        "compute": compute,
        "update": 0.0,
        "exposed": exposed,
        "idle": step - compute - exposed,
        "hidden": max(crossings - exposed, 0.0),
    }


def measure(
    names: Sequence[str], devices: Sequence[str], shrink: int, course: Course, *, cores: tuple[int, ...], notes: Notes
) -> list[Record]:
    """Every network in both placements. Raises `MissingPackage`, or `ProgramFailed` where losses differ."""
    python = find_python()
    found: list[Record] = []
    for device in devices:
        contenders = {who: _contender(python, who, device) for who in (OURS, OWN)}
        for name in names:
            for placement in (SERVERS, HALVES):
                case = Case(name, placement, device, shrink)
                found += _records(case, _run(case, contenders, course, cores, notes))
    return found


def _run(
    case: Case,
    contenders: Mapping[str, Contender],
    course: Course,
    cores: tuple[int, ...],
    notes: Notes,
) -> dict[str, Timed]:
    """The runtimes take turns; each has processes of its own for what is timed, so that memory goes back after it."""
    timed = {who: Timed() for who in contenders}
    for what in (STEP, COMPUTE, TRANSFER):
        stages: dict[str, Stage] = {}
        try:
            for who, contender in contenders.items():
                notes.progress(f"{case.title}: {what}: starting {who}")
                stages[who] = Stage(contender, cores)
            for number in range(course.rounds):
                order = list(stages)[number % 2 :] + list(stages)[: number % 2]
                for who in order:
                    notes.progress(f"{case.title}: {what}, round {number + 1} of {course.rounds}: {who}")
                    answers = stages[who].run(WARM, course.steps, case.word(what))
                    timed[who].by_what[what].add(answers, WARM, course.steps, 1)
                    timed[who].losses[what].append(answers[-1]["loss"])
                    timed[who].first[what] = answers[-1]["first"]
        finally:
            for stage in stages.values():
                stage.close()
    check_losses(case.title, timed)
    return timed


def check_losses(title: str, timed: Mapping[str, Timed]) -> None:
    """Raises `ProgramFailed` where ours does not have the bits of one process, or the first losses differ.

    Later losses of gRPC are not compared: over it, Inception-v3 has others in every run, and normalisations of two
    samples make much of the last bit.
    """
    ours, own = timed[OURS], timed[OWN]
    if ours.losses[STEP] != ours.losses[COMPUTE]:
        raise ProgramFailed(f"{title}: the losses are {ours.losses[STEP]}, in one process {ours.losses[COMPUTE]}")
    if not abs(ours.first[STEP] - own.first[STEP]) <= SAME_LOSS * abs(own.first[STEP]):
        raise ProgramFailed(f"{title}: the first loss is {ours.first[STEP]!r}, over {OWN} {own.first[STEP]!r}")


def _records(case: Case, timed: Mapping[str, Timed]) -> Iterator[Record]:
    shape = Workload("tensorflow", case.device, case.title, 0, f"{case.placement}-step", (), (OWN,))
    names = {who: who for who in timed}
    for record in records(shape, {who: each.by_what[STEP] for who, each in timed.items()}, names):
        each = timed[record.peer]
        details = {
            "step": record.seconds,
            **each.parts(),
            "crossings": each.by_what[TRANSFER].median,
            "alone": each.by_what[COMPUTE].median,
            "loss": each.losses[STEP][-1],
            "samples_per_second": case.size / record.seconds,
        }
        yield replace(record, details=details, bytes_per_second=None)


def _contender(python: str, peer: str, device: str) -> Contender:
    """The programs of worker 1 and worker 0."""
    runtime, carrier = (OWN, "tcp") if peer == OWN else (OURS, device)
    return replace(two_workers(python, "tensorflow_network.py", peer, runtime, carrier), together=True)
