"""What comes and goes during one run: functions that a partition calls between its operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.graph import Edge
from tensorwire.graph.kinds import BOUNDED, STATIC, VALUE
from tensorwire.graph.plan import PREFIX
from tensorwire.graph.rpc import RpcWires
from tensorwire.graph.wires import Wires
from tensorwire.observe import counters
from tensorwire.torch.graph.memory import extent_bytes, over, read_number, read_shape, write_number, write_shape

Function = Callable[..., Any]


class Post:
    """The ends of a plan's edges at one host, as functions over tensors."""

    def __init__(self, wires: Wires | RpcWires) -> None:
        self.wires = wires

    def sender(self, index: int) -> Function:
        """``send(value)`` for edge ``index``: a signal if it was born in its slot; else it is copied there first."""
        edge = self.wires.plan.edges[index]
        if edge.spec is None:
            return _named(lambda value: self._send_number(index, edge, value), "send", edge)
        if edge.lent:
            return _named(lambda value: self._lend(index, edge, value), "lend", edge)
        kinds = {VALUE: self._send_value, STATIC: self._send_static, BOUNDED: self._send_bounded}
        if edge.kind not in kinds:
            raise Unsupported(f"{edge.name}: {edge.spec} has no bound")
        send = kinds[edge.kind]
        return _named(lambda value: send(index, edge, value), "send", edge)

    def receiver(self, index: int, traced: Any) -> Function:
        """``receive()`` for edge ``index``: waits for it."""
        edge = self.wires.plan.edges[index]
        if edge.spec is None:
            return _named(lambda: self._receive_number(index, edge), "receive", edge)
        dtype = traced.dtype
        if edge.lent:
            return _named(lambda: self._borrow(index, edge, dtype), "borrow", edge)
        assert edge.slot is not None
        at = edge.slot + edge.offset
        if edge.kind == BOUNDED:
            return _named(lambda: self._receive_bounded(index, edge, dtype), "receive", edge)
        shape, stride = edge.spec.shape, edge.spec.stride
        if edge.kind == VALUE:
            return _named(lambda: self._receive_value(index, at, dtype, shape), "receive", edge)
        receive = self.wires.receive
        return _named(lambda: over(receive(index), at, dtype, shape, stride), "receive", edge)

    def birthplace(self, op: Any, edges: list[int]) -> Function:
        """``op``, whose outputs are born in the slots of ``edges``."""
        return op  # type: ignore[no-any-return]

    # ---- sending

    def _memory(self, edge: Edge) -> memoryview:
        assert self.wires.bank is not None
        assert edge.slot is not None
        return self.wires.bank.memory[edge.slot :]

    def _send_number(self, index: int, edge: Edge, value: Any) -> None:
        write_number(self._memory(edge), value)
        self.wires.send(index, 24)

    def _send_value(self, index: int, edge: Edge, value: torch.Tensor) -> None:
        held = self.wires.held
        assert edge.slot is not None
        if value.numel():
            torch.frombuffer(held, dtype=value.dtype, count=value.numel(), offset=edge.slot).view(value.shape).copy_(
                value
            )
        self.wires.send(index, max(1, value.numel() * value.element_size()))

    def _send_static(self, index: int, edge: Edge, value: torch.Tensor) -> None:
        held = self.wires.held
        assert held is not None
        assert edge.slot is not None
        assert edge.spec is not None
        assert edge.nbytes is not None
        at = edge.slot + edge.offset
        if edge.nbytes and (value.data_ptr() != held.ctypes.data + at or value.stride() != edge.spec.stride):
            over(held, at, value.dtype, edge.spec.shape, edge.spec.stride).copy_(value)
            counters.add(copies=1, copied_bytes=edge.nbytes)
        self.wires.send(index, edge.nbytes)

    def _send_bounded(self, index: int, edge: Edge, value: torch.Tensor) -> None:
        held = self.wires.held
        assert held is not None
        assert edge.slot is not None
        assert edge.nbytes is not None
        nbytes = extent_bytes(value)
        if nbytes > edge.nbytes:
            raise ArgumentError(f"{edge.name} has {nbytes} bytes now; its edge was made for at most {edge.nbytes}")
        write_shape(self._memory(edge), value)
        over(held, edge.slot + PREFIX, value.dtype, value.shape, value.stride()).copy_(value)
        counters.add(copies=1, copied_bytes=nbytes)
        self.wires.send(index, PREFIX + nbytes)

    def house(self, index: int, parameter: torch.Tensor) -> None:
        """Moves a parameter that is lent into the memory that it is lent from, so that no run copies it."""
        self._copy_loan(index, self.wires.plan.edges[index], parameter)
        if parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size():  # it has it for itself
            parameter.data = self._lent(index, parameter)

    def _lent(self, index: int, parameter: torch.Tensor) -> torch.Tensor:
        return over(self.wires.loan(index), 0, parameter.dtype, parameter.shape, parameter.stride())

    def _copy_loan(self, index: int, edge: Edge, parameter: torch.Tensor) -> None:
        self._lent(index, parameter).copy_(parameter.detach())
        counters.add(copies=1, copied_bytes=edge.nbytes or 0)

    def _lend(self, index: int, edge: Edge, parameter: torch.Tensor) -> None:
        if parameter.data_ptr() != self.wires.loan(index).ctypes.data:
            self._copy_loan(index, edge, parameter)
        self.wires.lend(index)

    def _borrow(self, index: int, edge: Edge, dtype: torch.dtype) -> torch.Tensor:
        assert edge.spec is not None
        return over(self.wires.receive(index), 0, dtype, edge.spec.shape, edge.spec.stride)

    # ---- receiving

    def _receive_number(self, index: int, edge: Edge) -> Any:
        assert edge.slot is not None
        return read_number(self.wires.receive(index).data[edge.slot :])

    def _receive_value(self, index: int, at: int, dtype: torch.dtype, shape: Any) -> torch.Tensor:
        value = torch.empty(shape, dtype=dtype)
        held = self.wires.receive(index)
        if value.numel():
            value.view(-1).copy_(torch.frombuffer(held, dtype=dtype, count=value.numel(), offset=at))
        return value

    def _receive_bounded(self, index: int, edge: Edge, dtype: torch.dtype) -> torch.Tensor:
        held = self.wires.receive(index)
        assert edge.slot is not None
        assert edge.spec is not None
        shape, stride = read_shape(held.data[edge.slot :], len(edge.spec.shape))
        return over(held, edge.slot + PREFIX, dtype, shape, stride)


def _named(function: Function, what: str, edge: Edge) -> Function:
    function.__name__ = f"{what}_{edge.name}"
    return function
