"""Shared by the benchmarks of training steps: starting contenders, comparing losses, records, the parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensorwire._native import available_bytes
from tensorwire.bench.compare import Samples, Stages, Workload, records, take_turns
from tensorwire.bench.programs import OURS, Answer, Contender, ProgramFailed, Stage
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes
from tensorwire.models import MODELS
from tensorwire.sizes import size_text
from tensorwire.trace.parts import ProcessTrace, parts_of_trace, typical

SAME_LOSS = 1e-4
Answers = Mapping[str, list[list[Answer]]]  # of each round, by contender


def titled(name: str, shrink: int) -> str:
    """What tables call a model whose hidden sizes are divided."""
    return MODELS[name].title + (f" / {shrink}" if shrink > 1 else "")


def step_records(
    workload: Workload, answers: Answers, warm: int, steps: int, details: Callable[[str, float], Mapping[str, float]]
) -> list[Record]:
    """A record for each contender, with ``details(peer, seconds)``; without a rate, which says nothing of a step."""
    made = records(workload, {name: Samples.of(rounds, warm, steps) for name, rounds in answers.items()})
    return [replace(r, details=details(r.peer, r.seconds), bytes_per_second=None) for r in made]


def mean(answers: Sequence[Answer], what: str) -> float:
    """The mean over the answers that have it: those of workers."""
    found = [answer[what] for answer in answers if what in answer]
    return sum(found) / len(found)


def check_losses(label: str, losses: Mapping[str, float], which: str = "loss") -> None:
    """Raises `ProgramFailed` unless all losses equal the first one, up to rounding."""
    wanted = next(iter(losses.values()))
    for name, loss in losses.items():
        if not abs(loss - wanted) <= SAME_LOSS * max(1.0, abs(wanted)):
            raise ProgramFailed(f"{label}: the {which} is {wanted:.6g} with {OURS}, but {loss:.6g} with {name}")


def started(
    stages: Stages,
    contenders: Mapping[str, Contender],
    ask: Callable[[str, Stage], list[Answer]],
    room: Mapping[str, float],
    base: str,
    *,
    label: str,
    notes: Notes,
    peers: Collection[str],
) -> dict[str, Contender]:
    """Starts contenders one after the other, with one ``ask`` each; those that may not fit into memory are left out.

    ``room``: the memory that each may take for each byte that ``base`` took. Raises as `take_turns`.
    """
    ready: dict[str, Contender] = {}
    took = 0
    for name, contender in contenders.items():
        before, needed = available_bytes(), round(room.get(name, 0.0) * took)
        if before < needed:
            notes.skip(f"{label}: {name} may take {size_text(needed)} of memory, and {size_text(before)} are left")
        elif take_turns(stages, {name: contender}, 1, ask, label=label, notes=notes, peers=peers):
            ready[name] = contender
        if name == base:
            took = max(0, before - available_bytes())
    return ready


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
