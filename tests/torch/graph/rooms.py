"""Memory to be born in, whose end can be seen."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from tensorwire.observe import counters
from tensorwire.torch.graph.memory.birthplace import Birthplace
from tensorwire.torch.graph.memory.target import ALIGNMENT, MemoryTarget, same_storage
from tests.torch.graph.operators import Case


class Room(np.ndarray[Any, Any]):
    """Bytes at an aligned address; as a lease is, it can be waited for."""


def room(nbytes: int) -> Room:
    """Bytes that no tensor has written yet."""
    memory = np.full(nbytes + ALIGNMENT, 0xEE, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(Room)


def place(nbytes: int) -> MemoryTarget:
    """A place of its own."""
    return MemoryTarget(room(nbytes))


def nbytes(tensor: torch.Tensor) -> int:
    """Of its storage."""
    return tensor.untyped_storage().nbytes()


def liveness(where: MemoryTarget) -> weakref.ref[Room]:
    """Dead when the memory of the place is free."""
    return weakref.ref(where.owner)


def listed(result: Any) -> list[Any]:
    """An operator's results, of whatever kind."""
    return [result] if isinstance(result, torch.Tensor) else list(result)


def call_in_places(
    birth: Birthplace, case: Case, dtype: torch.dtype, plain: list[Any]
) -> tuple[list[MemoryTarget], list[Any], int]:
    """Places for one call, its results in them, which are those of the ``plain`` operator, and how many were copied."""
    places = [place(nbytes(plain[i])) for i in case.outputs]
    before = counters.snapshot()
    torch.manual_seed(3)
    result, astray = birth(places, case.arguments(dtype))
    results = listed(result)
    assert astray == (), case.name
    assert all(p.holds(results[i]) for p, i in zip(places, case.outputs, strict=True)), case.name
    assert all(a is b is None or same_storage(a, b) for a, b in zip(results, plain, strict=True)), case.name
    return places, results, counters.since(before).copies
