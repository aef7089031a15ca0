"""Allocating and freeing parts of memory: best fit, so that tensors of one size take the same place."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush


class Space:
    """``nbytes``: the most that was ever in use, from 0 on. Taking and giving cost a logarithm of what is free."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._from: dict[int, int] = {}  # holes: where each begins, and how long it is
        self._to: dict[int, int] = {}  # the same holes by their ends
        self._sizes: list[int] = []  # that holes have, in order
        self._offsets: dict[int, list[int]] = {}  # heaps by size; entries that are no longer holes are skipped

    def allocate(self, nbytes: int) -> int:
        """The offset of so many bytes that nobody has: of the smallest hole that is long enough, else at the end."""
        at = bisect_left(self._sizes, nbytes)
        while at < len(self._sizes):
            size = self._sizes[at]
            heap = self._offsets[size]
            while heap and self._from.get(heap[0]) != size:
                heappop(heap)
            if heap:
                offset = heappop(heap)
                self._close(offset, size)
                self._open(offset + nbytes, size - nbytes)
                return offset
            del self._sizes[at], self._offsets[size]
        last = self._to.get(self.nbytes, 0)  # a hole at the end, which is too short
        offset = self.nbytes - last
        self._close(offset, last)
        self.nbytes = offset + nbytes
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Gives back what was taken."""
        before, behind = self._to.get(offset, 0), self._from.get(offset + nbytes, 0)
        self._close(offset - before, before)
        self._close(offset + nbytes, behind)
        self._open(offset - before, before + nbytes + behind)

    def _open(self, offset: int, size: int) -> None:
        if not size:
            return
        self._from[offset] = self._to[offset + size] = size
        if size not in self._offsets:
            insort(self._sizes, size)
            self._offsets[size] = []
        heappush(self._offsets[size], offset)

    def _close(self, offset: int, size: int) -> None:
        if size:
            del self._from[offset], self._to[offset + size]
