"""Tensors of torch's as items of state, and back."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch

from tensorwire.store.kept import Outline, number_item, value_of
from tensorwire.store.sharding import PARAMETER_DTYPES
from tensorwire.store.state_transfer import GROUP, NUMBER, Entry, Item


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements' bytes in the order of their indices; a view where they lie so, on the CPU."""
    array: np.ndarray[Any, np.dtype[np.uint8]]
    array = tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy()
    return array.data


def outline(value: object) -> Outline | None:
    """That of a tensor; None for others."""
    if not isinstance(value, torch.Tensor):
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    return (dtype, tuple(value.shape), tensor_bytes(value)) if dtype in PARAMETER_DTYPES else None


def whole_item(tensor: int, key: str, value: object, rows: bool) -> Item:
    """A whole value, a tensor or a number; ``rows``: it is cut with the tensor of that number in the plan."""
    found = outline(value)
    if found is None:
        return number_item(tensor, key, value)
    dtype, shape, data = found
    return Entry(tensor, key, dtype, shape, rows, 0, prod(shape)), data


def tensor_of(entry: Entry, data: memoryview) -> Any:
    """A whole value: a number, or a tensor over the same memory."""
    if entry.kind in (NUMBER, GROUP):
        return value_of(entry, data)
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return (
        torch.frombuffer(data, dtype=dtype).view(entry.shape) if data.nbytes else torch.empty(entry.shape, dtype=dtype)
    )
