"""Numbers and shapes in the memory of a bank."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import torch

from tensorwire.errors import Unsupported
from tensorwire.graph.kinds import MOST_DIMENSIONS
from tensorwire.graph.plan import AT, PREFIX

_NUMBER = struct.Struct("<qd")
_SHAPES = struct.Struct(f"<{2 * MOST_DIMENSIONS}q")
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
    """Copies ``value`` to ``room``, which it returns. All of a dimension of stride 0 is the same memory: once.

    Raises `Unsupported` if they share memory: the copy would overwrite what it has yet to read.
    """
    if overlap(room, value):
        raise Unsupported(f"a tensor of shape {list(value.shape)} would be copied onto memory that it lies in")
    there = room
    for dim in [dim for dim, stride in enumerate(room.stride()) if stride == 0 and room.shape[dim] > 1]:
        there, value = there.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    there.copy_(value)
    return room


def fitting(value: torch.Tensor, nbytes: int) -> Iterator[tuple[int, ...]]:
    """The strides with which ``value`` may lie in so many bytes: its own, else those of its dimensions' order without
    gaps."""
    if extent_bytes(value) <= nbytes:
        yield value.stride()
    elif value.numel() * value.element_size() <= nbytes:
        yield torch.empty_like(value, device="meta").stride()


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
    """Lengths and strides of a tensor, in front of it. Raises `Unsupported` for more than 8 dimensions."""
    if value.dim() > MOST_DIMENSIONS:
        raise Unsupported(
            f"a tensor of {value.dim()} dimensions whose lengths or strides were not known before cannot cross; "
            f"{MOST_DIMENSIONS} are the most: reshape it"
        )
    rest = (0,) * (MOST_DIMENSIONS - value.dim())
    _SHAPES.pack_into(memory, 0, *value.shape, *rest, *value.stride(), *rest)


def read_shape(memory: memoryview, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths and strides."""
    found = _SHAPES.unpack_from(memory)
    return found[:rank], found[MOST_DIMENSIONS : MOST_DIMENSIONS + rank]


def write_layout(memory: memoryview, at: int, value: torch.Tensor) -> None:
    """That ``value`` begins ``at`` bytes into the outbox, and its lengths and strides."""
    AT.pack_into(memory, 0, at)
    write_shape(memory[AT.size :], value)


def read_layout(memory: memoryview, rank: int) -> tuple[int, tuple[int, ...]]:
    """Where the tensor begins, and its strides."""
    (at,) = AT.unpack_from(memory)
    return at, read_shape(memory[AT.size :], rank)[1]


def span(value: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte and behind its last one."""
    return value.data_ptr(), value.data_ptr() + extent_bytes(value)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether some memory may be of both."""
    (begin, end), (start, stop) = span(one), span(other)
    return begin < stop and start < end
