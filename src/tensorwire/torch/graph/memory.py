"""Numbers and shapes in the memory of a bank."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from tensorwire.graph.plan import PREFIX

_NUMBER = struct.Struct("<qd")
_SHAPES = struct.Struct("<16q")
assert _SHAPES.size == PREFIX


def extent(size: Sequence[int]) -> int:
    """Elements from the first to behind the last; ``size``: lengths, then strides."""
    rank = len(size) // 2
    if 0 in size[:rank]:
        return 0
    return 1 + sum([(length - 1) * step for length, step in zip(size[:rank], size[rank:], strict=True)])


def extent_bytes(value: torch.Tensor) -> int:
    """Bytes from its first element to behind its last."""
    return extent((*value.shape, *value.stride())) * value.element_size()


def fill(room: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copies ``value`` to ``room``, which it returns. All of a dimension of stride 0 is the same memory: once."""
    there = room
    for dim in [dim for dim, stride in enumerate(room.stride()) if stride == 0 and room.shape[dim] > 1]:
        there, value = there.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    there.copy_(value)
    return room


def write_number(memory: memoryview, value: float) -> None:
    """An int, bool or float, for ``read_number``."""
    whole = isinstance(value, int)
    _NUMBER.pack_into(memory, 0, value if whole else 0, 0.0 if whole else value)
    memory[16] = whole


def read_number(memory: memoryview) -> int | float:
    """What ``write_number`` wrote; a bool comes as an int."""
    whole: int
    broken: float
    whole, broken = _NUMBER.unpack_from(memory)
    return whole if memory[16] else broken


def write_shape(memory: memoryview, value: torch.Tensor) -> None:
    """Lengths and strides of a tensor of at most 8 dimensions, in front of it."""
    rest = (0,) * (8 - value.dim())
    _SHAPES.pack_into(memory, 0, *value.shape, *rest, *value.stride(), *rest)


def read_shape(memory: memoryview, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths and strides."""
    found = _SHAPES.unpack_from(memory)
    return found[:rank], found[8 : 8 + rank]
