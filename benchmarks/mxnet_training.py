"""``python -m benchmarks mxnet``, training: RDMA-MXNet's two perceptrons, with MXNet's own store and with ours.

A step's seconds are what the slowest worker took. The stores take turns, and train on the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.modes import FOLDERS
from benchmarks.mxnet_jobs import OWN, Job
from benchmarks.mxnet_paper import Epoch
from benchmarks.turns import take_turns
from tensorwire.bench.compare import Samples, Workload, records
from tensorwire.bench.programs import OURS, Answer, Contender, ProgramFailed
from tensorwire.bench.records import Record, Target
from tensorwire.bench.show import Notes

BATCH = 128  # of each worker
SAME_LOSS = 1e-4
WARM = 2  # steps of a round that nobody times
FASTER = Target(shares={OWN: 1.0})


@dataclass(frozen=True)
class Network:
    """A perceptron. ``data``: as its program calls it. ``images``: how many make an epoch."""

    name: str
    title: str
    data: str
    images: int

    def epoch(self, workers: int, step: float) -> float:
        """Seconds of an epoch, whose steps take ``step`` each."""
        return math.ceil(self.images / (BATCH * workers)) * step


def networks(notes: Notes) -> list[Network]:
    """The two of RDMA-MXNet."""
    data, real = "fashion", Path(FOLDERS["fashion"]).is_dir()
    if not real:
        notes.say(
            f"there is no {FOLDERS['fashion']}, so random images take its place: apt install dataset-fashion-mnist"
        )
        data = "mnist"
    mnist = "Fashion-MNIST" if real else "random images of 28 x 28"
    return [
        Network("mnist", f"784-2048-1024-10 on {mnist}", data, 60_000),
        Network("cifar", "3072-2048-1024-10 on random images of 32 x 32 x 3", "cifar", 50_000),
    ]


@dataclass(frozen=True)
class Course:
    """How long: ``rounds`` of ``steps`` for each store, taking turns. ``shrink`` divides the hidden layers."""

    rounds: int
    steps: int
    shrink: int = 1


class Outcome:
    """What one store showed."""

    def __init__(self) -> None:
        self.samples, self.loss = Samples(), 0.0

    def add(self, answers: Sequence[Answer], steps: int) -> None:
        """One round's answers. Raises `ProgramFailed` where the workers' parameters differ."""
        workers = [answer for answer in answers if "loss" in answer]
        if len({worker["values"] for worker in workers}) != 1:
            raise ProgramFailed("the workers' parameters differ")
        self.samples.add(answers, WARM, steps, 1)
        self.loss = sum(worker["loss"] for worker in workers) / len(workers)


def measure(
    epochs: list[Epoch],
    job: Job,
    rate: str,
    *,
    devices: Sequence[str],
    course: Course,
    cores: Sequence[int],
    notes: Notes,
) -> list[Record]:
    """Both networks by one job; adds to ``epochs``."""
    found: list[Record] = []
    for network in networks(notes):
        made, seconds = contest(network, job, devices, rate, course, cores, notes)
        found += made
        epochs += seconds
    return found


def contest(
    network: Network, job: Job, devices: Sequence[str], rate: str, course: Course, cores: Sequence[int], notes: Notes
) -> tuple[list[Record], list[Epoch]]:
    """One network by one number of workers: for each device, ours beside MXNet's own. Raises `ProgramFailed`."""
    arguments = (network.data, course.shrink)
    contenders = {device: job.contender(OURS, device, "mxnet_train.py", *arguments) for device in devices}
    contenders[OWN] = job.contender(OWN, "tcp", "mxnet_train.py", *arguments)
    title = network.title + (f" / {course.shrink}" if course.shrink > 1 else "")
    outcomes = run(contenders, course, cores, f"{title}, {job.title}{f' over {rate}' if rate else ''}", notes)
    own = {OWN: outcomes.pop(OWN)} if OWN in outcomes else {}
    made = []
    for device, ours in outcomes.items():
        place = f"tcp over a link of {rate}" if rate else device
        name = f"MXNet, {title}, batch {job.workers} x {BATCH}, {place}"
        shape = Workload("mxnet", device, name, 0, "training-step", (), (OWN,), FASTER if course.shrink == 1 else None)
        made += _records(network, job.workers, shape, {OURS: ours, **own})
    where = f", {rate}" if rate else ""
    whole = {f"{OURS}, {device}": outcome for device, outcome in outcomes.items()} | own
    return made, [
        Epoch(network.name, title, who + where, job.workers, network.epoch(job.workers, outcome.samples.median))
        for who, outcome in whole.items()
    ]


def run(
    contenders: Mapping[str, Contender], course: Course, cores: Sequence[int], label: str, notes: Notes
) -> dict[str, Outcome]:
    """All rounds. MXNet's own store is left out where it fails."""
    answers = take_turns(
        contenders, course.rounds, WARM, course.steps, cores=cores, label=label, notes=notes, tolerated=(OWN,)
    )
    outcomes = {name: Outcome() for name in answers}
    for name, rounds in answers.items():
        for each in rounds:
            outcomes[name].add(each, course.steps)
    check_losses(label, outcomes)
    return outcomes


def check_losses(label: str, outcomes: Mapping[str, Outcome]) -> None:
    """Who has trained on the same batches has the same loss, up to rounding. Raises `ProgramFailed`."""
    wanted = next(iter(outcomes.values())).loss
    for name, outcome in outcomes.items():
        if not abs(outcome.loss - wanted) <= SAME_LOSS * max(1.0, abs(wanted)):
            raise ProgramFailed(f"{label}: the loss is {wanted:.6g} with {OURS}, but {outcome.loss:.6g} with {name}")


def _records(network: Network, workers: int, shape: Workload, outcomes: Mapping[str, Outcome]) -> list[Record]:
    made = records(shape, {name: o.samples for name, o in outcomes.items()}, {name: name for name in outcomes})
    return [
        replace(
            record,
            details={
                "loss": outcomes[record.peer].loss,
                "samples_per_second": BATCH * workers / record.seconds,
                "epoch": network.epoch(workers, record.seconds),
            },
        )
        for record in made
    ]
