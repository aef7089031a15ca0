"""The layouts of tensors in memory, and copies of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from tensorwire.edge import Spec
from tensorwire.errors import Unsupported


def extent(size: Sequence[int]) -> int:
    """Elements from the first to the last; ``size``: lengths, then strides."""
    rank = len(size) // 2
    if 0 in size[:rank]:
        return 0
    return 1 + sum([(length - 1) * step for length, step in zip(size[:rank], size[rank:], strict=True)])


def extent_bytes(value: torch.Tensor) -> int:
    """Bytes from its first element to its last."""
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


def actual_spec(value: torch.Tensor) -> Spec:
    """What ``value`` is, and how it lies."""
    return _actual_spec(value.shape, value.dtype, value.stride())


@functools.lru_cache(maxsize=1024)
def _actual_spec(shape: torch.Size, dtype: torch.dtype, strides: tuple[int, ...]) -> Spec:
    return Spec(tuple(shape), str(dtype).removeprefix("torch."), strides)


def span(value: torch.Tensor) -> tuple[int, int]:
    """The address of its first byte, and the one after its last."""
    return value.data_ptr(), value.data_ptr() + extent_bytes(value)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether some memory may be of both."""
    (begin, end), (start, stop) = span(one), span(other)
    return begin < stop and start < end
