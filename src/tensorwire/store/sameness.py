"""Whether all workers push the same gradients in the first rounds: if so, they most likely read the same data."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

_ROUNDS = 3
_FIRST = 64 << 10  # bytes: where gradients differ, they mostly do so here
_TEXT = (
    "tensorwire: warning: all {} workers pushed the same gradients in the first {} steps, so that they probably read "
    "the same data: give each worker its own part, as with DistributedSampler(dataset, num_replicas=job.num_workers, "
    "rank=job.rank)\n"
)
_warned = False  # once a process, and so once a job


class Sameness:
    """Looks until gradients differ for the first time, which with different data they do in the first bucket."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._left = _ROUNDS
        self._something = False  # whether any gradient is not zero
        self.watching = workers > 1 and not _warned

    def compare(self, slots: Sequence[memoryview], present: Sequence[bytes]) -> None:
        """One bucket of a round, as each worker has pushed it."""
        first, *others = [np.frombuffer(slot, np.uint8) for slot in slots]
        if any(there != present[0] for there in present[1:]):
            self.watching = False
        elif any(present[0]):
            for part in (slice(_FIRST), slice(_FIRST, None)):
                if not all(np.array_equal(first[part], other[part]) for other in others):
                    self.watching = False
                    return
            self._something = self._something or bool(first.any())

    def end_round(self) -> bool:
        """Whether now, and only now, it is sure enough."""
        self._left -= 1 if self._something else 0
        if self._left or not self.watching:
            return False
        self.watching = False
        return True

    def warn(self) -> None:
        """Warns, once per process."""
        global _warned
        if not _warned:
            _warned = True
            sys.stderr.write(_TEXT.format(self._workers, _ROUNDS))
            sys.stderr.flush()
