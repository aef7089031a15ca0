"""Which bucket a server takes next: of those that have arrived, the one that workers need first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from tensorwire.store.sharding import Bucket

# While no bucket is there, between looks at all of them: at first, and at most.
_SHORTEST, _LONGEST = 0.001, 0.064
_NEAR = 16  # buckets that are looked at while others are there: arrivals keep about to the order of the last round


class ReadyQueue:
    """Looks for buckets in the order in which they came in the round before.

    Without ``overlap`` workers wait for all of them, and the next one is all that is looked for: looking further made a
    step over a full link longer.
    """

    def __init__(self, buckets: Sequence[Bucket], *, overlap: bool) -> None:
        self._near = _NEAR if overlap else 1
        self._urgency = [bucket.first for bucket in buckets]
        self._order = list(range(len(buckets)))

    def of_round(self, ready: Callable[[int], bool], poll: Callable[[int, float], None]) -> Iterator[int]:
        """All buckets, each once it is ``ready``.

        If none is ready, waits briefly (``poll``) for the one that came first in the last round. The wait is short
        because the first rounds may have another order: the plan begins with the first layer, whose gradients come
        last when backward pushes them.
        """
        waiting, self._order = self._order, []
        there: list[tuple[tuple[int, int], int]] = []
        patience = _SHORTEST
        while waiting or there:
            came = [b for b in waiting[: self._near] if ready(b)]
            if not came and not there:
                came = [b for b in waiting[self._near :] if ready(b)]
            for bucket in came:
                waiting.remove(bucket)
                self._order.append(bucket)
                heapq.heappush(there, (self._urgency[bucket], bucket))
            if there:
                patience = _SHORTEST
                yield heapq.heappop(there)[1]
            else:
                poll(waiting[0], patience)
                patience = min(2 * patience, _LONGEST)
