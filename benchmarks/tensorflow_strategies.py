"""``python -m benchmarks tensorflow --part strategies``: data-parallel training by ``tf.distribute`` and by our store.

Two workers train one network, each on batches of its own, by SGD. Gradients of all are averaged in a step: by
``MultiWorkerMirroredStrategy``, which sends them round in a ring, and by ours in `Sync`. Or a server takes them one by
one: that of ``ParameterServerStrategy``, and ours in `Async`. The seconds are those of the slowest worker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.libraries import PROGRAMS
from benchmarks.options import Options
from benchmarks.steps import Answers, check_losses, mean, step_records, titled
from benchmarks.tensorflow import find_python
from benchmarks.tensorflow_training import SERVERS, SIZES
from tensorwire.bench.compare import Settings, Stages, Workload, asking, take_turns
from tensorwire.bench.programs import OURS, Contender, job
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes

MIRRORED, PARAMETER_SERVER = "mirrored", "ps"
WORKERS = 2
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
        return f"{titled(self.name, self.shrink)}, batch {WORKERS} x {self.size}, {self.way}, {device}"

    def contender(self, python: str, peer: str, device: str) -> Contender:
        """Its programs: the servers, and the workers; or with `PARAMETER_SERVER` the chief."""
        way = self.way if peer == OURS else peer
        program, words = (python, str(PROGRAMS / "tensorflow_workers.py")), (way, self.name, self.shrink, self.size)
        made = job(peer, program, *words, device, workers=WORKERS, servers=int(peer != MIRRORED), together=True)
        if peer != PARAMETER_SERVER:
            return made
        server, second, first = made.commands  # and a chief, for which all others work
        chief = tuple("chief" if word == "worker" else word for word in first)
        return replace(made, commands=(server, first, second, chief), servers=3)


def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """Every network in both ways. Raises `MissingPackage`, or `ProgramFailed` where losses differ."""
    found: list[Record] = []
    for name in options.workloads:
        for way, peer in (("sync", MIRRORED), ("async", PARAMETER_SERVER)):
            found += contest(Case(name, options.shrink, way, peer), options, settings, notes)
    return found


def contest(case: Case, options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """Ours over each device beside TensorFlow's own, which uses TCP."""
    python, label = find_python(), case.title("shm")
    contenders = {device: case.contender(python, OURS, device) for device in options.devices}
    contenders[case.peer] = case.contender(python, case.peer, "tcp")
    steps = asking(WARM, options.steps)
    with Stages(settings.cores) as stages:
        told = take_turns(stages, contenders, settings.rounds, steps, label=label, notes=notes, peers=(case.peer,))
    if case.way == "sync":
        # Later losses are not compared: normalisations of two samples make much of the last bit.
        check_losses(label, {name: mean(rounds[0], "second") for name, rounds in told.items()}, "second loss")
    own = {name: rounds for name, rounds in told.items() if name == case.peer}
    found = []
    for device in options.devices:
        answers = {OURS: told[device], **own}

        def details(peer: str, seconds: float, answers: Answers = answers) -> dict[str, float]:
            loss = mean(answers[peer][-1], "loss")
            return {"loss": loss, "samples_per_second": WORKERS * case.size / seconds}

        shape = Workload("tensorflow", device, case.title(device), 0, f"{case.way}-step", (), (case.peer,))
        found += step_records(shape, answers, WARM, options.steps, details)
    return found
