"""Functions that a partition calls to send a value: one an edge, made once, with all that can be known before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensorwire.edge import Lease
from tensorwire.errors import ArgumentError
from tensorwire.graph import Edge
from tensorwire.graph.plan import PREFIX
from tensorwire.graph.rpc import RpcWires
from tensorwire.graph.wires import Wires
from tensorwire.observe import counters, spans
from tensorwire.observe.spans import clock
from tensorwire.torch.graph.memory import extent_bytes, fill, write_number, write_shape
from tensorwire.torch.graph.place import over

AnyWires = Wires | RpcWires
Send = Callable[[Any], None]


def number(wires: AnyWires, index: int, edge: Edge) -> Send:
    """An int, bool or float, by value."""
    at = _slot(edge)

    def send(value: Any) -> None:
        write_number(_bank(wires)[at:], value)
        wires.send(index, 24)

    return send


def small(wires: AnyWires, index: int, edge: Edge) -> Send:
    """A tensor of a few bytes, by value."""
    at = _slot(edge)

    def send(value: torch.Tensor) -> None:
        there = over(wires.held, dtype=value.dtype, shape=value.shape, offset=at)
        fill(there, value)
        wires.send(index, value.numel() * value.element_size())

    return send


def static(wires: AnyWires, index: int, edge: Edge) -> Send:
    """A tensor that was born in its slot; another one is copied there."""
    shape, strides = layout(edge)
    at, nbytes = _slot(edge) + edge.offset, _nbytes(edge)

    def send(value: torch.Tensor) -> None:
        held = wires.held
        assert held is not None
        if nbytes and (value.data_ptr() != held.ctypes.data + at or value.stride() != strides):
            _copy(wires, index, value, over(held, dtype=value.dtype, shape=shape, strides=strides, offset=at))
        wires.send(index, nbytes)

    return send


def bounded(wires: AnyWires, index: int, edge: Edge) -> Send:
    """A tensor of varying shape, with its shape in front. Raises `ArgumentError` above the bound."""
    at, most = _slot(edge), _nbytes(edge)

    def send(value: torch.Tensor) -> None:
        held, nbytes = wires.held, extent_bytes(value)
        assert held is not None
        if nbytes > most:
            raise ArgumentError(f"{edge.name} has {nbytes} bytes now; its edge was made for at most {most}")
        write_shape(_bank(wires)[at:], value)
        if nbytes and value.data_ptr() != held.ctypes.data + at + PREFIX:
            there = over(held, dtype=value.dtype, shape=value.shape, strides=value.stride(), offset=at + PREFIX)
            _copy(wires, index, value, there)
        wires.send(index, PREFIX + nbytes)

    return send


def dynamic(wires: AnyWires, index: int, edge: Edge, born: dict[int, Lease]) -> Send:
    """A tensor of any size, with its shape in front. ``born``: by edge, the memory that it may have been born in."""
    assert isinstance(wires, Wires)

    def send(value: torch.Tensor) -> None:
        nbytes, lease = extent_bytes(value), born.pop(index, None)
        if lease is None or lease.nbytes != PREFIX + nbytes or not _lies_in(lease, value):
            lease = wires.room(index, PREFIX + nbytes)
            room = over(lease.memory, dtype=value.dtype, shape=value.shape, strides=value.stride(), offset=PREFIX)
            fill(room, value)
            counters.add(copies=1, copied_bytes=nbytes)
        write_shape(lease.memory, value)
        wires.send_dynamic(index, lease)

    return send


def _lies_in(lease: Lease, value: torch.Tensor) -> bool:
    """Whether ``value`` begins behind the prefix; of one without elements there is nothing to copy."""
    return not value.numel() or value.data_ptr() == lease.slab.region.address + lease.offset + PREFIX


def lent(wires: AnyWires, index: int, edge: Edge) -> Send:
    """A parameter that lives in the memory it is lent from; one that was moved elsewhere is copied there."""

    def send(parameter: torch.Tensor) -> None:
        if parameter.data_ptr() != wires.loan(index).ctypes.data:
            _copy_loan(wires, index, edge, parameter)
        wires.lend(index)

    return send


def house(wires: AnyWires, index: int, edge: Edge, parameter: torch.Tensor) -> None:
    """Moves a parameter that is lent into the memory that it is lent from, so that no run copies it."""
    loan = _copy_loan(wires, index, edge, parameter)
    if parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size():  # it has it for itself
        parameter.data = loan


def _copy_loan(wires: AnyWires, index: int, edge: Edge, parameter: torch.Tensor) -> torch.Tensor:
    loan = over(wires.loan(index), dtype=parameter.dtype, shape=parameter.shape, strides=parameter.stride())
    _copy(wires, index, parameter.detach(), loan)
    return loan


def _copy(wires: AnyWires, index: int, value: torch.Tensor, there: torch.Tensor) -> None:
    """A copy on its way out, counted; it keeps the thread that computes, as sending does."""
    start = clock()
    fill(there, value)
    counters.add(copies=1, copied_bytes=value.numel() * value.element_size())
    spans.add("push", wires.run, start, clock(), wires.what[index])


def layout(edge: Edge) -> tuple[Any, Any]:
    """Shape and strides of a static edge."""
    assert edge.spec is not None
    return edge.spec.shape, edge.spec.stride


def _bank(wires: AnyWires) -> memoryview:
    assert wires.bank is not None
    return wires.bank.memory


def _slot(edge: Edge) -> int:
    assert edge.slot is not None
    return edge.slot


def _nbytes(edge: Edge) -> int:
    assert edge.nbytes is not None
    return edge.nbytes
