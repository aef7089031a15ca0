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

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.options import Options
from benchmarks.steps import Answers, step_records, titled
from benchmarks.tensorflow import OWN, find_python, two_workers
from tensorwire.bench.compare import Samples, Settings, Stages, Workload, asking, take_turns
from tensorwire.bench.programs import OURS, Contender, ProgramFailed
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
        return f"{titled(self.name, self.shrink)}, batch {self.size}, {TITLES[self.placement]}, {self.device}"

    def word(self, what: str) -> str:
        """What a program is told."""
        return f"{self.name},{self.placement},{what},{self.shrink},{self.size}"


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


def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """Every network in both placements. Raises `MissingPackage`, or `ProgramFailed` where losses differ."""
    python = find_python()
    found: list[Record] = []
    for device in options.devices:
        contenders = {
            who: replace(two_workers(python, "tensorflow_network.py", who, who, carrier), together=True)
            for who, carrier in ((OURS, device), (OWN, "tcp"))
        }
        for name in options.workloads:
            for placement in (SERVERS, HALVES):
                found += contest(Case(name, placement, device, options.shrink), contenders, options, settings, notes)
    return found


def contest(
    case: Case, contenders: Mapping[str, Contender], options: Options, settings: Settings, notes: Notes
) -> list[Record]:
    """The runtimes take turns; each has processes of its own for what is timed, so that memory goes back after it."""
    told: dict[str, Answers] = {}
    for what in (STEP, COMPUTE, TRANSFER):
        steps = asking(WARM, options.steps, case.word(what))
        with Stages(settings.cores) as stages:
            label = f"{case.title}: {what}"
            told[what] = take_turns(stages, contenders, settings.rounds, steps, label=label, notes=notes, peers=())
    check_losses(case.title, told)

    def details(who: str, seconds: float) -> dict[str, float]:
        step, alone, crossings = (Samples.of(told[what][who], WARM, options.steps).median for what in told)
        return {
            "step": step,
            **parts_of(step, alone, crossings),
            "crossings": crossings,
            "alone": alone,
            "loss": told[STEP][who][-1][-1]["loss"],
            "samples_per_second": case.size / seconds,
        }

    shape = Workload("tensorflow", case.device, case.title, 0, f"{case.placement}-step", (), (OWN,))
    return step_records(shape, told[STEP], WARM, options.steps, details)


def check_losses(title: str, told: Mapping[str, Answers]) -> None:
    """Raises `ProgramFailed` where ours does not have the bits of one process, or the first losses differ.

    Later losses of gRPC are not compared: over it, Inception-v3 has others in every run, and normalisations of two
    samples make much of the last bit.
    """
    step, alone = ([answers[-1]["loss"] for answers in told[what][OURS]] for what in (STEP, COMPUTE))
    if step != alone:
        raise ProgramFailed(f"{title}: the losses are {step}, in one process {alone}")
    ours, own = (told[STEP][who][-1][-1]["first"] for who in (OURS, OWN))
    if not abs(ours - own) <= SAME_LOSS * abs(own):
        raise ProgramFailed(f"{title}: the first loss is {ours!r}, over {OWN} {own!r}")
