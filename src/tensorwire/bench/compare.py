"""One workload: its contenders run in interleaved rounds, and the medians become records."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from tensorwire._native import available_bytes
from tensorwire.bench.programs import OURS, Answer, Contender, ProgramFailed, Stage
from tensorwire.bench.records import Record, Target
from tensorwire.bench.show import Notes
from tensorwire.sizes import size_text

Commands = tuple[tuple[str, ...], ...]
_COUNTS = ("copies", "rpcs", "registrations")
_SLEEPS = ("sleeps", "wake_ups")  # counts, too
_PARTS = ("calling", "waiting")  # seconds
_DELAYS = ("median", "p99_over_median", "slowest_key_over_median")  # of the worst worker
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
    """Seconds of each round, counts per operation, and the parts of an operation in seconds in each round."""

    seconds: list[float] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    parts: dict[str, list[float]] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The figure."""
        return statistics.median(self.seconds)

    def add(self, answers: Sequence[Answer], warm: int, count: int, per: int) -> None:
        """One round's answers: the slowest end's time, the counts of both ends."""
        self.seconds.append(max(a["seconds"] for a in answers) / count / per)
        for name in (*_COUNTS, *_SLEEPS):
            if name in answers[-1]:
                self.counts[name] = sum(a.get(name, 0) for a in answers) / (warm + count)
        for name in _PARTS:
            if name in answers[-1]:
                self.parts.setdefault(name, []).append(answers[-1][name])
        for name in _DELAYS:
            if name in answers[-1]:
                self.parts.setdefault(name, []).append(max(a[name] for a in answers if name in a))

    @property
    def details(self) -> dict[str, float] | None:
        """What else is told of an operation; None where nothing is."""
        if not self.parts:
            return None
        counts = {name: self.counts[name] for name in _SLEEPS if name in self.counts}
        return {name: statistics.median(seconds) for name, seconds in self.parts.items()} | counts


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
        groups = {c.name: c.group or c.name for c in workload.contenders}
        made += records(workload, {name: samples[name] for name in groups if name in samples}, groups)
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
    """Measures contenders in turns; a peer that fails is skipped with a note."""
    stages: dict[str, tuple[Contender, Stage, int]] = {}
    for contender in contenders:
        notes.progress(f"{workload.name}: {contender.name}")
        with _tolerated(contender, notes):
            stage = running.get(contender)
            stages[contender.name] = (
                contender,
                stage,
                _calibrate(stage, contender.word, settings.seconds, workload.least),
            )
    samples = {name: Samples() for name in stages}
    for round in range(1, settings.rounds + 1):
        for name, (contender, stage, count) in _in_turns(stages, round):
            notes.progress(f"{workload.name}: round {round} of {settings.rounds}: {name}")
            with _tolerated(contender, notes):
                if name in samples:
                    _round(contender, stage, count, workload.per, samples)
    return samples


def _round(contender: Contender, stage: Stage, count: int, per: int, samples: dict[str, Samples]) -> None:
    warm = count // 8 + 1
    try:
        samples[contender.name].add(stage.run(warm, count, contender.word), warm, count, per)
    except ProgramFailed:
        del samples[contender.name]
        raise


@contextlib.contextmanager
def _tolerated(contender: Contender, notes: Notes) -> Iterator[None]:
    try:
        yield
    except ProgramFailed as error:
        if contender.name.startswith(OURS):
            raise
        notes.skip(f"{contender.name}: {error}")


Turn = tuple[str, tuple[Contender, Stage, int]]


def _in_turns(stages: Mapping[str, tuple[Contender, Stage, int]], round: int) -> list[Turn]:
    items = list(stages.items())
    at = round % max(1, len(items))  # nobody is always the first after a pause
    return items[at:] + items[:at]


def _calibrate(stage: Stage, word: str, seconds: float, least: int) -> int:
    """How many operations take about ``seconds``; warms memory and caches as well."""
    count = 1
    for part in (0.01, 0.1, 1.0):
        took = max(stage.run(1, count, word)[-1]["seconds"] / count, 1e-9)
        if took > seconds:
            return least
        count = max(least, min(_MOST_OPERATIONS, int(part * seconds / took)))
    return count


def records(workload: Workload, samples: Mapping[str, Samples], groups: Mapping[str, str]) -> list[Record]:
    """A record a contender; the limit is the best of the first group that was measured."""
    best: dict[str, str] = {}
    for name, measured in samples.items():
        group = groups[name]
        if group not in best or measured.median < samples[best[group]].median:
            best[group] = name
    medians = {group: samples[name].median for group, name in best.items()}
    limit = next((group for group in workload.limits if group in best), None)
    return [_record(workload, name, samples[name], limit, best, medians) for name in samples]


def _record(
    workload: Workload,
    name: str,
    measured: Samples,
    limit: str | None,
    best: Mapping[str, str],
    medians: Mapping[str, float],
) -> Record:
    seconds = measured.median
    record = Record(
        bench=workload.bench,
        device=workload.device,
        peer=name,
        mode=workload.mode,
        workload=workload.name,
        bytes=workload.nbytes,
        seconds=seconds,
        # Where no byte moved there is no rate.
        bytes_per_second=workload.nbytes / seconds
        if workload.nbytes and not workload.mode.endswith("mapped")
        else None,
        limit=None if limit is None else best[limit],
        limit_value=None if limit is None else medians[limit],
        ratio=None if limit is None else medians[limit] / seconds,
        copies=measured.counts.get("copies"),
        rpcs=measured.counts.get("rpcs"),
        registrations=measured.counts.get("registrations"),
        low=min(measured.seconds),
        high=max(measured.seconds),
        rounds=len(measured.seconds),
        target=None,
        met=None,
        details=measured.details if workload.device == "tcp" or _DELAYS[0] in measured.parts else None,
        how=next((c.how for c in workload.contenders if c.name == name and c.how), None),
    )
    if workload.target is None or name != OURS:
        return record
    judged = record.high if workload.target.worst else seconds
    return replace(record, target=str(workload.target), met=workload.target.met(judged, medians))
