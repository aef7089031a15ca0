"""Memory to be born in, whose end can be seen."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from tensorwire.torch.graph.memory.target import ALIGNMENT, MemoryTarget


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
