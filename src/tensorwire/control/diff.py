"""The differences between two members' texts, in a few lines. Linear in their length, as it runs between heartbeats."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest

_LINES = 10  # of each side
_WIDTH = 200


def differing_lines(a_name: str, a: str, b_name: str, b: str) -> str:
    """The lines that only ``a`` has (``-``) and that only ``b`` has (``+``), or where their order first differs.

    One line, if there is one on each side.
    """
    ours, theirs = a.splitlines(), b.splitlines()
    only_a, only_b = _without(ours, theirs), _without(theirs, ours)
    if not only_a and not only_b:
        for number, (left, right) in enumerate(zip_longest(ours, theirs, fillvalue=""), 1):
            if left != right:
                only_a, only_b = [f"(line {number}) {left}"], [f"(line {number}) {right}"]
                break
        else:
            return "their descriptions read the same; the details differ"
    if len(only_a) == len(only_b) == 1:
        return f"{a_name} has {_shown('', only_a)[0]}, {b_name} {_shown('', only_b)[0]}"
    return "\n".join([f"--- {a_name}", f"+++ {b_name}", *_shown("-", only_a), *_shown("+", only_b)])


def _without(lines: list[str], others: list[str]) -> list[str]:
    """The lines that are not among ``others``, as often as they are not."""
    left = Counter(others)
    found = []
    for line in lines:
        if left[line] > 0:
            left[line] -= 1
        else:
            found.append(line)
    return found


def _shown(sign: str, lines: list[str]) -> list[str]:
    shown = [sign + (line if len(line) <= _WIDTH else line[:_WIDTH] + " ...") for line in lines[:_LINES]]
    more = len(lines) - _LINES
    return [*shown, f"{sign}... and {more} lines more"] if more > 0 else shown
