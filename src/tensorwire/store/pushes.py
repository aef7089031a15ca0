"""A worker's contribution to a round of a bucket."""

from __future__ import annotations

from typing import NamedTuple

WRITER = -1  # in the place of a worker: one that is no part of the job, whose slots are not always the same


class Push(NamedTuple):
    """One contribution. ``present``: a byte per piece, whether there is a gradient."""

    worker: int
    slot: memoryview
    present: bytes
    weight: float = 1.0
