"""Functions that a partition calls to receive a value, one per edge. Each waits for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tensorwire._native import Hold
from tensorwire.edge import Spec
from tensorwire.edge.group import EdgeGroup
from tensorwire.edge.header import HEADER, MOST_BYTES, unpack
from tensorwire.edge.tensor import contiguous
from tensorwire.errors import ProtocolError
from tensorwire.graph import Edge
from tensorwire.observe import counters
from tensorwire.torch.graph.execution.sending import layout
from tensorwire.torch.graph.memory.strided import fill
from tensorwire.torch.graph.memory.target import over
from tensorwire.torch.graph.placement.remote_tensor import reserve

Receive = Callable[[], Any]


def number(group: EdgeGroup, index: int, at: int) -> Receive:
    """An int, bool or float."""
    return lambda: unpack(memoryview(group.receive(index)), at, 0).value


def small(group: EdgeGroup, index: int, edge: Edge, at: int, dtype: torch.dtype) -> Receive:
    """A tensor of a few bytes; it has its memory for itself."""
    shape, strides, _ = layout(edge)

    def receive() -> torch.Tensor:
        there = _found(group, index, group.receive(index), dtype, shape, strides, at)
        return fill(torch.empty_strided(shape, there.stride(), dtype=dtype), there)

    return receive


def static(group: EdgeGroup, index: int, edge: Edge, dtype: torch.dtype) -> Receive:
    """A tensor in its slot, or in the memory that it was lent from."""
    shape, strides, _ = layout(edge)
    at = edge.offset + (edge.slot or 0)
    return lambda: _found(group, index, group.receive(index), dtype, shape, strides, at)


def _found(
    group: EdgeGroup, index: int, held: Hold, dtype: torch.dtype, shape: Any, strides: Any, at: int
) -> torch.Tensor:
    """The tensor where the plan says, unless its source describes another layout."""
    described = group.described(index, held)
    if described is not None:
        assert described.spec is not None
        at, strides = described.offset, described.spec.strides
    return over(held, dtype=dtype, shape=shape, strides=strides, offset=at)


def bounded(group: EdgeGroup, index: int, edge: Edge, at: int, dtype: torch.dtype) -> Receive:
    """A tensor in its slot, with a header in front."""
    assert edge.nbytes is not None
    most = edge.nbytes

    def receive() -> torch.Tensor:
        held = group.receive(index)
        spec = _spec(edge, unpack(memoryview(held), at, most).spec)
        return over(held, dtype=dtype, shape=spec.shape, strides=spec.strides, offset=at + HEADER)

    return receive


def if_small(group: EdgeGroup, index: int, edge: Edge, dtype: torch.dtype, stayed: set[str]) -> Receive:
    """A copy of a tensor, with a header in front. Of one that is too large there is only the header: the result has no
    memory then, and its name is added to ``stayed``."""
    assert edge.nbytes is not None
    at, most = edge.slot or 0, edge.nbytes

    def receive() -> torch.Tensor:
        held = group.receive(index)
        spec = _spec(edge, unpack(memoryview(held), at, MOST_BYTES).spec)
        if math.prod(spec.shape) * dtype.itemsize > most:
            stayed.add(edge.name)
            return reserve(spec.shape, spec.strides or contiguous(spec.shape), dtype)
        return _copied(over(held, dtype=dtype, shape=spec.shape, strides=spec.strides, offset=at + HEADER))

    return receive


def dynamic(group: EdgeGroup, index: int, edge: Edge, dtype: torch.dtype) -> Receive:
    """A tensor of any size. It keeps its memory."""

    def receive() -> torch.Tensor:
        payload, found = group.receive_dynamic(index)
        spec = _spec(edge, found)
        return over(payload, dtype=dtype, shape=spec.shape, strides=spec.strides)

    return receive


def _spec(edge: Edge, found: Spec | None) -> Spec:
    """What arrived. Raises `ProtocolError` if it is not what the plan says of ``edge``."""
    planned = edge.spec
    assert planned is not None
    if found is None or found.dtype != planned.dtype or len(found.shape) != len(planned.shape):
        raise ProtocolError(f"{edge.name} came as {found}, and the plan says {planned}")
    return found


def own(receive: Receive) -> Receive:
    """A copy of what is received, which the caller may keep and change."""

    def receive_own() -> Any:
        value = receive()
        return _copied(value) if isinstance(value, torch.Tensor) else value

    return receive_own


def _copied(value: torch.Tensor) -> torch.Tensor:
    counters.add(copies=1, copied_bytes=value.numel() * value.element_size())
    return fill(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype), value)
