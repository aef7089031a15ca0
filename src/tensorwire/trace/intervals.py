"""Sets of points in time as lists of intervals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as sorted intervals that do not touch."""
    merged: list[Interval] = []
    for start, stop in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def common(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The points that are in both."""
    others = union(second)
    return [part for a, b in union(first) for part in within(others, a, b)]


def without(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The points of ``first`` that are not in ``second``."""
    others = union(second)
    left = []
    for a, b in union(first):
        for c, d in within(others, a, b):
            if a < c:
                left.append((a, c))
            a = d
        if a < b:
            left.append((a, b))
    return left


def within(merged: Sequence[Interval], start: float, stop: float) -> list[Interval]:
    """The part of ``merged``, which is sorted and does not touch, between two moments."""
    found = []
    for at in range(bisect_right(merged, start, key=lambda i: i[1]), len(merged)):
        a, b = merged[at]
        if a >= stop:
            break
        found.append((max(a, start), min(b, stop)))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Seconds covered; overlaps count once."""
    return sum(stop - start for start, stop in union(intervals))
