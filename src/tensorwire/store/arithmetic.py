"""The arithmetic of rules that add, average and copy: over arrays of numpy's, or tensors of torch's. Imports neither.

Sums are taken in worker order, and those of half precision in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tensorwire.store.rule_names import ASSIGN, MEAN, SUM

Array = np.ndarray[Any, Any]
ArrayFunction = Callable[[Any, Any, dict[str, Any], dict[str, Any]], None]


def add(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """The rule ``"sum"``."""
    parameter += gradient


def assign(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """The rules ``"assign"`` and ``"mean"``, whose pushes are averaged before."""
    parameter[...] = gradient


NAMED: dict[str, ArrayFunction] = {SUM: add, ASSIGN: assign, MEAN: assign}


def reduced(pushed: Iterator[Array], weights: Sequence[float], divisor: float, room: Callable[[], Array]) -> Array:
    """The sum of as many arrays as ``weights``, each times its weight, over ``divisor``, in the array ``room()``.

    Whole numbers are divided without a rest. A single array that counts once is returned as it is.
    """
    plain = all(weight == 1.0 for weight in weights)
    first = next(pushed)
    if len(weights) == 1 and plain and divisor == 1:
        return first
    total = room()
    if plain and len(weights) > 1:
        np.add(first, next(pushed), out=total, dtype=total.dtype)
        weights = weights[2:]
    else:
        total[...] = 0
        pushed = itertools.chain([first], pushed)
    for weight, value in zip(weights, pushed, strict=True):
        total += value if weight == 1.0 else value * total.dtype.type(weight)
    if divisor != 1 and total.dtype.kind == "f":
        total /= total.dtype.type(divisor)
    elif divisor != 1:
        total //= int(divisor)
    return total
