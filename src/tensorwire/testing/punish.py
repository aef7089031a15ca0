"""Kills, stops and sends away workers of a job at random, to see what it survives.

A seed gives the same faults in the same order, with the same pauses; at which instruction each of them strikes is left
to the machine.

Source: the idea is torchft's punisher, github.com/pytorch/torchft.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS: Mapping[str, int] = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}


@dataclass(frozen=True)
class WorkerFault:
    """What happens to a worker. ``kind``: one of `KINDS`; ``rank``: whose; ``pause``: seconds since the last one."""

    kind: str
    rank: int
    pause: float


def random_faults(
    seed: int, workers: int, *, kinds: Sequence[str] = ("kill",), pauses: tuple[float, float] = (0.1, 2.0)
) -> Iterator[WorkerFault]:
    """Faults without end, the same ones for the same arguments.

    Args:
        seed: Where they begin.
        workers: Ranks are below it.
        kinds: What may happen, of `KINDS`.
        pauses: The shortest and the longest time between two faults, in seconds.

    Yields:
        One fault after the other.
    """
    chance = random.Random(seed)
    while True:
        yield WorkerFault(chance.choice(list(kinds)), chance.randrange(workers), chance.uniform(*pauses))


def find_workers(launcher: int) -> dict[int, int]:
    """The worker processes that a launcher has started, and that are there.

    Args:
        launcher: The pid of ``tensorwire run``.

    Returns:
        Pids by rank.
    """
    found: dict[int, int] = {}
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    for child in children.read_text().split() if children.exists() else ():
        try:
            environment = dict(
                item.split("=", 1) for item in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in item
            )
        except OSError:  # it ended meanwhile
            continue
        if "TENSORWIRE_RANK" in environment:
            found[int(environment["TENSORWIRE_RANK"])] = int(child)
    return found


def punish(
    workers: Callable[[], Mapping[int, int]], faults: Iterator[WorkerFault], over: Callable[[], bool]
) -> list[WorkerFault]:
    """Lets faults happen until a job is over.

    Args:
        workers: The pids of the workers that are there now, by rank: see `find_workers`.
        faults: What is to happen; one whose worker is not there, or the only one, is left out.
        over: Whether to end.

    Returns:
        The faults that happened.
    """
    happened = []
    for fault in faults:
        end = time.monotonic() + fault.pause
        while not over() and time.monotonic() < end:
            time.sleep(0.01)
        if over():
            break
        there = workers()
        if fault.rank in there and len(there) > 1:
            try:
                os.kill(there[fault.rank], KINDS[fault.kind])
            except ProcessLookupError:
                continue
            happened.append(fault)
    return happened
