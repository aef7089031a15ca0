"""What comes and goes during one run: the functions that a partition calls between its operators, edge by edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensorwire.errors import Unsupported
from tensorwire.graph.kinds import BOUNDED, STATIC, VALUE
from tensorwire.torch.graph import receiving, sending
from tensorwire.torch.graph.birth import Birthplace, Place
from tensorwire.torch.graph.importer import spec_of
from tensorwire.torch.graph.sending import AnyWires

Function = Callable[..., Any]


class Post:
    """The ends of a plan's edges at one host, as functions over tensors."""

    def __init__(self, wires: AnyWires) -> None:
        self._wires = wires
        self._edges = wires.plan.edges

    def sender(self, index: int) -> Function:
        """``send(value)`` for edge ``index``."""
        edge, wires = self._edges[index], self._wires
        if edge.spec is None:
            send = sending.number(wires, index, edge)
        elif edge.lent:
            send = sending.lent(wires, index, edge)
        elif edge.kind in _SENDERS:
            send = _SENDERS[edge.kind](wires, index, edge)
        else:
            raise Unsupported(f"{edge.name}: {edge.spec} has no bound")
        return _named(send, f"send_{edge.name}")

    def receiver(self, index: int, dtype: torch.dtype | None, *, own: bool) -> Function:
        """``receive()`` for edge ``index``. ``own``: what it returns has its memory for itself."""
        edge, wires = self._edges[index], self._wires
        at = edge.slot or 0
        if edge.spec is None or dtype is None:
            receive = receiving.number(wires, index, at)
        elif edge.kind == VALUE:
            receive = receiving.small(wires, index, edge, at, dtype)
        elif edge.kind == BOUNDED:
            receive = receiving.bounded(wires, index, edge, at, dtype)
        else:
            receive = receiving.static(wires, index, edge, dtype)
        if own and edge.kind != VALUE:
            receive = receiving.own(receive)
        return _named(receive, f"receive_{edge.name}")

    def birthplace(self, op: Any, edges: list[int], traced: Any) -> Function:
        """``op``, whose outputs are born in the slots of ``edges``; ``traced``: what it returned when captured."""
        outputs = traced if isinstance(traced, (tuple, list)) else (traced,)
        slots: dict[int, Any] = {self._edges[index].index: self._edges[index].slot for index in edges}
        rooms = [(slot, spec_of(outputs[output]).nbytes) for output, slot in slots.items()]
        birthplace, wires = Birthplace(op, tuple(slots)), self._wires

        def born(*args: Any, **kwargs: Any) -> Any:
            places = [Place(wires.held, offset=slot, nbytes=nbytes) for slot, nbytes in rooms]
            return birthplace(places, args, kwargs)[0]  # what went astray is copied when it is sent

        return _named(born, f"born_{self._edges[edges[0]].name}")

    def house(self, index: int, parameter: torch.Tensor) -> None:
        """Moves a parameter into the memory that edge ``index`` lends it from."""
        sending.house(self._wires, index, self._edges[index], parameter)


_SENDERS = {VALUE: sending.small, STATIC: sending.static, BOUNDED: sending.bounded}


def _named(function: Function, name: str) -> Function:
    """As people read it in tracebacks and in the generated code."""
    function.__name__ = name
    return function
