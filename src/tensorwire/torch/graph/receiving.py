"""Functions that a partition calls to receive a value: one an edge. Each waits for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tensorwire.graph import Edge
from tensorwire.graph.bank import Held
from tensorwire.graph.plan import PREFIX
from tensorwire.graph.wires import Wires
from tensorwire.observe import counters
from tensorwire.torch.graph.elsewhere import hollow
from tensorwire.torch.graph.memory import fill, read_layout, read_number, read_shape
from tensorwire.torch.graph.place import over
from tensorwire.torch.graph.sending import layout

Receive = Callable[[], Any]


def number(wires: Wires, index: int, at: int) -> Receive:
    """An int, bool or float."""
    return lambda: read_number(wires.receive(index).data[at:])


def small(wires: Wires, index: int, edge: Edge, at: int, dtype: torch.dtype) -> Receive:
    """A tensor of a few bytes; it has its memory for itself."""
    shape, strides, _ = layout(edge)

    def receive() -> torch.Tensor:
        there = _found(wires, index, wires.receive(index), dtype, shape, strides, at)
        return fill(torch.empty_strided(shape, there.stride(), dtype=dtype), there)

    return receive


def static(wires: Wires, index: int, edge: Edge, dtype: torch.dtype) -> Receive:
    """A tensor in its slot, or in the memory that it was lent from."""
    shape, strides, _ = layout(edge)
    at = edge.offset + (edge.slot or 0)
    return lambda: _found(wires, index, wires.receive(index), dtype, shape, strides, at)


def _found(wires: Wires, index: int, held: Held, dtype: torch.dtype, shape: Any, strides: Any, at: int) -> torch.Tensor:
    """The tensor where the plan says, unless its source describes another layout."""
    described = wires.layout(index, held)
    if described is not None:
        at, strides = read_layout(described, len(shape))
    return over(held, dtype=dtype, shape=shape, strides=strides, offset=at)


def bounded(wires: Wires, index: int, edge: Edge, at: int, dtype: torch.dtype) -> Receive:
    """A tensor in its slot, with its shape in front."""
    assert edge.spec is not None
    rank = len(edge.spec.shape)

    def receive() -> torch.Tensor:
        held = wires.receive(index)
        shape, strides = read_shape(held.data[at:], rank)
        return over(held, dtype=dtype, shape=shape, strides=strides, offset=at + PREFIX)

    return receive


def if_small(wires: Wires, index: int, edge: Edge, dtype: torch.dtype, stayed: set[str]) -> Receive:
    """A copy of a tensor, with its shape in front. Of one that is too large there is only the shape: the result has no
    memory then, and its name is added to ``stayed``."""
    assert edge.spec is not None
    assert edge.nbytes is not None
    rank, at, most = len(edge.spec.shape), edge.slot or 0, edge.nbytes

    def receive() -> torch.Tensor:
        held = wires.receive(index)
        shape, strides = read_shape(held.data[at:], rank)
        if math.prod(shape) * dtype.itemsize > most:
            stayed.add(edge.name)
            return hollow(shape, strides, dtype)
        return _copied(over(held, dtype=dtype, shape=shape, strides=strides, offset=at + PREFIX))

    return receive


def dynamic(wires: Wires, index: int, edge: Edge, dtype: torch.dtype) -> Receive:
    """A tensor of any size, with its shape in front. It keeps its memory."""
    assert edge.spec is not None
    rank = len(edge.spec.shape)

    def receive() -> torch.Tensor:
        memory = wires.receive_dynamic(index).memory
        shape, strides = read_shape(memory, rank)
        return over(memory, dtype=dtype, shape=shape, strides=strides, offset=PREFIX)

    return receive


def own(receive: Receive) -> Receive:
    """A copy of what is received, for a caller who may do with it what he likes."""

    def receive_own() -> Any:
        value = receive()
        return _copied(value) if isinstance(value, torch.Tensor) else value

    return receive_own


def _copied(value: torch.Tensor) -> torch.Tensor:
    counters.add(copies=1, copied_bytes=value.numel() * value.element_size())
    return fill(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype), value)
