"""``python -m benchmarks tensorflow --part strategies``: data-parallel training by ``tf.distribute`` and by our store.

Two workers train one network, each on batches of its own, by SGD. Gradients of all are averaged in a step: by
``MultiWorkerMirroredStrategy``, which sends them round in a ring, and by ours in `Sync`. Or a server takes them one by
one: that of ``ParameterServerStrategy``, and ours in `Async`. The seconds are those of the slowest worker.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.libraries import PROGRAMS
from benchmarks.tensorflow import find_python
from benchmarks.tensorflow_training import SERVERS, SIZES
from benchmarks.training import Course
from benchmarks.turns import take_turns
from tensorwire.bench.compare import Samples, Workload, records
from tensorwire.bench.models import MODELS
from tensorwire.bench.programs import OURS, Answer, Contender, ProgramFailed
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes

MIRRORED, PARAMETER_SERVER = "mirrored", "ps"
WORKERS = 2
SAME_LOSS = 1e-4
WARM = 2  # steps of a round that nobody times


@dataclass(frozen=True)
class Case:
    """One network, and one way in which its workers learn from each other."""

    name: str
    shrink: int
    way: str  # ours
    peer: str

    @property
    def size(self) -> int:
        """Samples of a worker's step."""
        return SIZES[SERVERS][self.name]

    def title(self, device: str) -> str:
        """What tables call it."""
        narrow = f" / {self.shrink}" if self.shrink > 1 else ""
        return f"{MODELS[self.name].title}{narrow}, batch {WORKERS} x {self.size}, {self.way}, {device}"

    def contender(self, python: str, peer: str, device: str) -> Contender:
        """Its programs: the servers, and the workers; or with `PARAMETER_SERVER` the chief."""
        way = self.way if peer == OURS else peer
        roles = [("worker", 1), ("worker", 0)]
        servers = 0
        if way == PARAMETER_SERVER:
            roles, servers = [("server", 0), ("worker", 0), ("worker", 1), ("chief", 0)], 3
        elif peer == OURS:
            roles, servers = [("server", 0), *roles], 1
        words = [way, device, self.name, self.shrink, self.size]
        commands = tuple(
            (python, str(PROGRAMS / "tensorflow_workers.py"), role, str(index), *map(str, words))
            for role, index in roles
        )
        secret = {"TENSORWIRE_SECRET": secrets.token_hex(32)}
        return Contender(peer, commands, servers=servers, environment=secret, together=True)


def measure(
    names: Sequence[str], devices: Sequence[str], shrink: int, course: Course, *, cores: tuple[int, ...], notes: Notes
) -> list[Record]:
    """Every network in both ways. Raises `MissingPackage`, or `ProgramFailed` where losses differ."""
    python = find_python()
    found: list[Record] = []
    for name in names:
        for case in (Case(name, shrink, "sync", MIRRORED), Case(name, shrink, "async", PARAMETER_SERVER)):
            found += _contest(case, python, devices, course, cores, notes)
    return found


def _contest(
    case: Case, python: str, devices: Sequence[str], course: Course, cores: tuple[int, ...], notes: Notes
) -> list[Record]:
    """Ours over each device beside TensorFlow's own, which uses TCP."""
    contenders = {device: case.contender(python, OURS, device) for device in devices}
    contenders[case.peer] = case.contender(python, case.peer, "tcp")
    label = case.title("shm")
    answers = take_turns(
        contenders,
        course.rounds,
        WARM,
        course.steps,
        cores=cores,
        label=label,
        notes=notes,
        tolerated=(case.peer,),
    )
    if case.way == "sync":
        check_losses(label, answers)
    own = {name: rounds for name, rounds in answers.items() if name == case.peer}
    found = []
    for device in devices:
        shape = Workload("tensorflow", device, case.title(device), 0, f"{case.way}-step", (), (case.peer,))
        found += _records(case, shape, {OURS: answers[device], **own}, course.steps)
    return found


def _records(case: Case, shape: Workload, answers: Mapping[str, list[list[Answer]]], steps: int) -> list[Record]:
    samples = {name: Samples() for name in answers}
    for name, rounds in answers.items():
        for each in rounds:
            samples[name].add(each, WARM, steps, 1)
    made = records(shape, samples, {name: name for name in samples})
    return [
        replace(
            record,
            details={
                "loss": _mean(answers[record.peer][-1], "loss"),
                "samples_per_second": WORKERS * case.size / record.seconds,
            },
            bytes_per_second=None,
        )
        for record in made
    ]


def _mean(answers: Sequence[Answer], name: str) -> float:
    """Over the workers."""
    found = [answer[name] for answer in answers if name in answer]
    return sum(found) / len(found)


def check_losses(label: str, answers: Mapping[str, list[list[Answer]]]) -> None:
    """Who averages gradients of the same batches has the same loss after an update, up to rounding.

    Later losses are not compared: normalisations of two samples make much of the last bit. Raises `ProgramFailed`.
    """
    losses = {name: _mean(rounds[0], "second") for name, rounds in answers.items()}
    wanted = next(iter(losses.values()))
    for name, loss in losses.items():
        if not abs(loss - wanted) <= SAME_LOSS * max(1.0, abs(wanted)):
            raise ProgramFailed(f"{label}: the second loss is {wanted:.6g} with {OURS}, but {loss:.6g} with {name}")
