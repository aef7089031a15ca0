"""A worker's contribution to a round of a bucket."""

from __future__ import annotations

from typing import NamedTuple

from tensorwire.control.settings import MOST_MEMBERS

WRITER = -1  # in the place of a worker: one that is no part of the job, whose slots are not always the same


def source_of(worker: int, incarnation: int, *, kept: bool = False) -> int:
    """Under which number rules know the slots of a process. ``kept``: those of what it pushed late."""
    return worker + MOST_MEMBERS * (2 * incarnation + kept)


class Push(NamedTuple):
    """One contribution. ``worker``: as of `source_of`. ``present``: a byte per piece, whether there is a gradient."""

    worker: int
    slot: memoryview
    present: bytes
    weight: float = 1.0
