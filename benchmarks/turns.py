"""Contenders whose programs train, and take turns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tensorwire.bench.compare import Stages
from tensorwire.bench.programs import Answer, Contender, ProgramFailed
from tensorwire.bench.show import Notes


def take_turns(
    contenders: Mapping[str, Contender],
    rounds: int,
    warm: int,
    steps: int,
    *,
    cores: Sequence[int],
    label: str,
    notes: Notes,
    tolerated: Collection[str],
) -> dict[str, list[list[Answer]]]:
    """The answers of each round, by contender. A tolerated one is left out where it fails. Raises `ProgramFailed`."""
    found: dict[str, list[list[Answer]]] = {name: [] for name in contenders}
    with Stages(cores) as stages:
        for number in range(rounds):
            names = list(found)
            at = number % len(names)  # nobody is always the first after a pause
            for name in names[at:] + names[:at]:
                notes.progress(f"{label}: round {number + 1} of {rounds}: {name}")
                try:
                    found[name].append(stages.get(contenders[name]).run(warm, steps))
                except ProgramFailed as error:
                    if name not in tolerated:
                        raise
                    notes.skip(f"{label}: {name}: {error}")
                    del found[name]
    return found
