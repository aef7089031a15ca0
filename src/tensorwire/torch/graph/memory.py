"""Numbers and shapes in the memory of a bank."""

from __future__ import annotations

import struct

import torch

from tensorwire.graph.plan import PREFIX

_NUMBER = struct.Struct("<qd")
_SHAPES = struct.Struct("<16q")
assert _SHAPES.size == PREFIX


def extent_bytes(value: torch.Tensor) -> int:
    """Bytes from its first element to behind its last."""
    if value.numel() == 0:
        return 0
    reach = sum((length - 1) * step for length, step in zip(value.shape, value.stride(), strict=True))
    return (reach + 1) * value.element_size()


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
