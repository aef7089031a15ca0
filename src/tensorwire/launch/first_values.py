"""Gives all workers worker 0's first values: they compare digests, and only differing values travel."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorwire.launch.worker import Worker


class Outline(NamedTuple):
    """What is compared of a value."""

    dtype: str
    shape: list[int]
    digest: bytes


def outline(dtype: str, shape: Sequence[int], data: Any) -> Outline:
    """``data``: its bytes, as a buffer."""
    return Outline(dtype, list(shape), hashlib.sha256(data).digest())


class FirstValues(NamedTuple):
    """``values``: worker 0's, by name, where they differ here. ``names``: all of worker 0's. ``alike``: those of them
    that have the same dtype and shape here."""

    values: dict[str, Any]
    names: list[str]
    alike: set[str]


def first_values(
    worker: Worker, mine: Mapping[str, Outline], value: Callable[[str], Any], seconds: float
) -> FirstValues:
    """Every worker calls it. ``value(name)``: what worker 0 sends. Raises `WaitTimeout` or `JobEnded`."""
    meet = worker.collectives
    sent: dict[str, list[Any]] = meet.broadcast({name: list(each) for name, each in mine.items()}, 0, seconds)
    theirs = {name: Outline(*each) for name, each in sent.items()}
    alike = {n for n in theirs if n in mine and mine[n][:2] == theirs[n][:2]}
    differ = {n for n in alike if mine[n] != theirs[n]}
    wanted = meet.all_reduce(np.array([0, *(n in differ for n in theirs)], np.int64), "max", seconds)[1:]
    names = [n for n, anybody in zip(theirs, wanted, strict=True) if anybody]
    if not names:
        return FirstValues({}, list(theirs), alike)
    values = meet.broadcast([value(n) for n in names] if worker.rank == 0 else None, 0, seconds)
    return FirstValues({n: v for n, v in zip(names, values, strict=True) if n in differ}, list(theirs), alike)
