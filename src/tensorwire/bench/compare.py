"""One workload: its contenders run in interleaved rounds, and the medians become records."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from tensorwire._native import available_bytes
from tensorwire.bench.programs import OURS, Answer, Contender, ProgramFailed, Stage
from tensorwire.bench.records import Record, Target
from tensorwire.bench.show import Notes
from tensorwire.sizes import size_text

Commands = tuple[tuple[str, ...], ...]
_COUNTS = ("copies", "rpcs", "registrations")
# What else is told of an operation, of the worst program.
_TOLD = (
    "median",
    "p99_over_median",
    "slowest_key_over_median",
    "pause",
    "copy",
    "steps_per_second",
    "versions_per_second",
)
_MOST_OPERATIONS = 20_000


@dataclass(frozen=True)
class Settings:
    """How long a measurement is: ``rounds`` of about ``seconds`` for each contender, on these cores."""

    rounds: int
    seconds: float
    cores: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """What is compared. ``limits``: groups of contenders; the first that was measured is the limit.

    ``per``: how many figures a timed operation stands for; 2 where it is a round trip and the figure is one way.
    ``stage``: those that follow each other with the same one share the processes of contenders that both have; without
    one, those whose contenders are all the same. ``least``: operations of a round, however long they take.
    """

    bench: str
    device: str
    name: str
    nbytes: int
    mode: str
    contenders: tuple[Contender, ...]
    limits: tuple[str, ...] = ()
    target: Target | None = None
    per: int = 1
    stage: str = ""
    least: int = 1


@dataclass
class Samples:
    """Seconds of each round, counts per operation, and in each round what else is told of an operation."""

    seconds: list[float] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    parts: dict[str, list[float]] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The figure."""
        return statistics.median(self.seconds)

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Answer]], warm: int, count: int, per: int = 1) -> Samples:
        """What was answered in ``rounds`` of ``warm`` operations that nobody timed and ``count`` that were."""
        made = cls()
        for answers in rounds:
            made.add(answers, warm, count, per)
        return made

    def add(self, answers: Sequence[Answer], warm: int, count: int, per: int) -> None:
        """One round's answers: the slowest end's time, the counts of both ends."""
        self.seconds.append(max(a["seconds"] for a in answers) / count / per)
        for name in _COUNTS:
            if name in answers[-1]:
                self.counts[name] = sum(a.get(name, 0) for a in answers) / (warm + count)
        for name in _TOLD:
            if told := [a[name] for a in answers if name in a]:
                self.parts.setdefault(name, []).append(max(told))

    @property
    def details(self) -> dict[str, float] | None:
        """What else is told of an operation; None where nothing is."""
        return {name: statistics.median(told) for name, told in self.parts.items()} or None


class Stages:
    """Programs that run, by their commands, for workloads that follow each other. A context manager."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = cores
        self._by_commands: dict[Commands, Stage] = {}

    def get(self, contender: Contender) -> Stage:
        """The contender's programs, started if they do not run. Raises `ProgramFailed`."""
        stage = self._by_commands.get(contender.commands)
        if stage is None or not stage.programs:  # it failed in an earlier workload
            stage = self._by_commands[contender.commands] = Stage(contender, self._cores)
        return stage

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        for stage in self._by_commands.values():
            stage.close()


def take_turns(
    running: Stages,
    contenders: Mapping[str, Contender],
    rounds: int,
    ask: Callable[[str, Stage], list[Answer]],
    *,
    label: str,
    notes: Notes,
    peers: Collection[str] | None = None,
) -> dict[str, list[list[Answer]]]:
    """Runs the rounds of all contenders, in turns; returns their answers by round.

    A peer that fails is left out, with a note. ``peers``: their names; by default all that do not begin with ours.

    Raises `ProgramFailed` where another one fails.
    """
    found: dict[str, list[list[Answer]]] = {name: [] for name in contenders}
    for number in range(rounds):
        names = list(found)
        at = number % max(1, len(names))  # nobody is always the first after a pause
        for name in names[at:] + names[:at]:
            notes.progress(f"{label}: round {number + 1} of {rounds}: {name}")
            try:
                found[name].append(ask(name, running.get(contenders[name])))
            except ProgramFailed as error:
                if name not in peers if peers is not None else name.startswith(OURS):
                    raise
                notes.skip(f"{name}: {error}")
                del found[name]
    return found


def asking(warm: int, count: int, word: str = "") -> Callable[[str, Stage], list[Answer]]:
    """Asks everybody for the same round."""
    return lambda _, stage: stage.run(warm, count, word)


def compare_all(workloads: Sequence[Workload], settings: Settings, notes: Notes) -> list[Record]:
    """One workload after the other; those of the same programs share them."""
    made: list[Record] = []
    for _, group in groupby(workloads, key=lambda w: w.stage or [c.commands for c in w.contenders]):
        made += _compare_sharing(list(group), settings, notes)
    return made


def _compare_sharing(workloads: Sequence[Workload], settings: Settings, notes: Notes) -> list[Record]:
    """Those that share programs. Programs that do not fit into memory together run one after the other."""
    found: list[dict[str, Samples]] = [{} for _ in workloads]
    for together in fitting(workloads, available_bytes(), notes):
        with Stages(settings.cores) as stages:
            for workload, samples in zip(workloads, found, strict=True):
                contenders = [c for c in workload.contenders if c.commands in together]
                samples.update(measure(workload, contenders, settings, notes, stages))
    made: list[Record] = []
    for workload, samples in zip(workloads, found, strict=True):
        made += records(workload, {c.name: samples[c.name] for c in workload.contenders if c.name in samples})
    return made


def fitting(workloads: Sequence[Workload], left: int, notes: Notes) -> list[set[Commands]]:
    """The commands of the contenders that are to run at the same time, where ``left`` bytes of memory are left.

    What does not fit in even by itself is skipped with a note.
    """
    needs: dict[Commands, int] = {}
    for contender in (c for workload in workloads for c in workload.contenders):
        if contender.memory > left:
            needed = f"it may take {size_text(contender.memory)} of memory, and {size_text(left)} are left"
            notes.skip(f"{workloads[0].name}: {contender.name}: {needed}")
        else:
            needs[contender.commands] = contender.memory
    if sum(needs.values()) <= left:
        return [set(needs)]
    notes.say(f"{workloads[0].name}: one after another, not in turns: together they may take more memory than is left")
    return [{commands} for commands in needs]


def measure(
    workload: Workload, contenders: Sequence[Contender], settings: Settings, notes: Notes, running: Stages
) -> dict[str, Samples]:
    """Measures contenders in turns."""
    counts: dict[str, int] = {}

    def calibrate(name: str, stage: Stage) -> list[Answer]:
        counts[name] = _calibrate(stage, named[name].word, settings.seconds, workload.least)
        return []

    def run(name: str, stage: Stage) -> list[Answer]:
        return stage.run(counts[name] // 8 + 1, counts[name], named[name].word)

    named = {c.name: c for c in contenders}
    ready = take_turns(running, named, 1, calibrate, label=workload.name, notes=notes)
    left = {name: named[name] for name in ready}
    answers = take_turns(running, left, settings.rounds, run, label=workload.name, notes=notes)
    return {name: Samples.of(told, counts[name] // 8 + 1, counts[name], workload.per) for name, told in answers.items()}


def _calibrate(stage: Stage, word: str, seconds: float, least: int) -> int:
    """How many operations take about ``seconds``; warms memory and caches as well."""
    count = 1
    for part in (0.01, 0.1, 1.0):
        took = max(stage.run(1, count, word)[-1]["seconds"] / count, 1e-9)
        if took > seconds:
            return least
        count = max(least, min(_MOST_OPERATIONS, int(part * seconds / took)))
    return count


def records(workload: Workload, samples: Mapping[str, Samples]) -> list[Record]:
    """A record a contender; the limit is the best of the first group that was measured."""
    groups = {c.name: c.group or c.name for c in workload.contenders}
    best: dict[str, str] = {}
    for name, measured in samples.items():
        group = groups.get(name, name)
        if group not in best or measured.median < samples[best[group]].median:
            best[group] = name
    medians = {group: samples[name].median for group, name in best.items()}
    limit = next((group for group in workload.limits if group in best), None)
    made = []
    for name, measured in samples.items():
        seconds, counts, mapped = measured.median, measured.counts, workload.mode.endswith("mapped")
        record = Record(
            bench=workload.bench,
            device=workload.device,
            peer=name,
            mode=workload.mode,
            workload=workload.name,
            bytes=workload.nbytes,
            seconds=seconds,
            # Where no byte moved there is no rate.
            bytes_per_second=workload.nbytes / seconds if workload.nbytes and not mapped else None,
            limit=None if limit is None else best[limit],
            limit_value=None if limit is None else medians[limit],
            ratio=None if limit is None else medians[limit] / seconds,
            **{what: counts.get(what) for what in _COUNTS},  # type: ignore[arg-type]
            low=min(measured.seconds),
            high=max(measured.seconds),
            rounds=len(measured.seconds),
            details=measured.details,
            how=next((c.how for c in workload.contenders if c.name == name and c.how), None),
        )
        if workload.target is not None and name == OURS:
            met = workload.target.met(record.high if workload.target.worst else seconds, medians)
            record = replace(record, target=str(workload.target), met=met)
        made.append(record)
    return made
