"""The sends and receives of one run: the functions that a partition calls between its operators, edge by edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensorwire.edge import Lease
from tensorwire.edge.group import EdgeGroup
from tensorwire.edge.header import HEADER
from tensorwire.graph.kinds import BOUNDED, DYNAMIC, VALUE
from tensorwire.graph.plan import Plan
from tensorwire.torch.graph.execution import receiving, sending
from tensorwire.torch.graph.memory.birthplace import Birthplace, MemoryTarget
from tensorwire.torch.graph.memory.strided import extent

Function = Callable[..., Any]


class Transfers:
    """The ends of a plan's edges at one worker, as functions over tensors."""

    def __init__(self, group: EdgeGroup, plan: Plan) -> None:
        self._group, self._plan, self._edges = group, plan, plan.edges
        self._leases: dict[int, Lease] = {}  # of dynamic edges, from birth to sending
        self._stayed: set[str] = set()  # of what crosses only while it is small, what did not in this run

    def sender(self, index: int) -> Function:
        """``send(value)`` for edge ``index``."""
        edge, group = self._edges[index], self._group
        if edge.spec is None:
            send = sending.number(group, index, edge)
        elif edge.lent:
            send = sending.lent(group, index, edge)
        elif edge.if_small:
            send = sending.if_small(group, index, edge, self._stayed)
        elif edge.kind == DYNAMIC:
            send = sending.dynamic(group, index, edge, self._leases)
        elif edge.kind == BOUNDED:
            send = sending.bounded(group, index, edge)
        else:
            kind = sending.small if edge.kind == VALUE else sending.static
            send = kind(group, index, edge, edge.name in self._plan.siblings)
        return _named(send, f"send_{edge.name}")

    def receiver(self, index: int, dtype: torch.dtype | None, *, own: bool) -> Function:
        """``receive()`` for edge ``index``. ``own``: what it returns has its memory for itself."""
        edge, group = self._edges[index], self._group
        at = edge.slot or 0
        if edge.spec is None or dtype is None:
            receive = receiving.number(group, index, at)
        elif edge.if_small:
            return _named(receiving.if_small(group, index, edge, dtype, self._stayed), f"receive_{edge.name}")
        elif edge.kind == VALUE:
            receive = receiving.small(group, index, edge, at, dtype)
        elif edge.kind == DYNAMIC:
            receive = receiving.dynamic(group, index, edge, dtype)
        elif edge.kind == BOUNDED:
            receive = receiving.bounded(group, index, edge, at, dtype)
        else:
            receive = receiving.static(group, index, edge, dtype)
        if own and edge.kind != VALUE:
            receive = receiving.own(receive)
        return _named(receive, f"receive_{edge.name}")

    def take_stayed(self) -> frozenset[str]:
        """The values that were too large to cross in this run, by name; the next run begins with none."""
        stayed = frozenset(self._stayed)
        self._stayed.clear()
        return stayed

    def birthplace(self, op: Any, outputs: dict[int, int], dtypes: list[torch.dtype]) -> Function:
        """``born(sizes, args, kwargs)``: ``op``, whose outputs are born where their edges have them; ``outputs``: the
        edge of each. ``sizes`` has lengths and strides of each output."""
        birthplace = Birthplace(op, tuple(outputs))
        rooms = [self._room(index) for index in outputs.values()]
        widths = [dtype.itemsize for dtype in dtypes]

        def born(sizes: list[list[int]], args: Any, kwargs: Any) -> Any:
            places = [room(extent(size) * width) for room, size, width in zip(rooms, sizes, widths, strict=True)]
            return birthplace(places, args, kwargs)[0]  # what went astray is copied when it is sent

        return _named(born, f"born_{self._edges[next(iter(outputs.values()))].name}")

    def _room(self, index: int) -> Callable[[int], MemoryTarget]:
        """``room(nbytes)``: where edge ``index`` is to be born."""
        edge, group = self._edges[index], self._group
        if edge.kind == DYNAMIC:
            return lambda nbytes: self._lease(index, nbytes)
        assert edge.slot is not None
        slot = edge.slot + (HEADER if edge.kind == BOUNDED else 0)
        return lambda nbytes: MemoryTarget(group.held, offset=slot, nbytes=nbytes)

    def _lease(self, index: int, nbytes: int) -> MemoryTarget:
        lease = self._leases[index] = self._group.room(index, nbytes)
        return MemoryTarget(lease.hold, nbytes=nbytes)

    def adopt(self, index: int, parameter: torch.Tensor) -> None:
        """Moves a parameter into the memory that edge ``index`` lends it from."""
        sending.adopt(self._group, index, self._edges[index], parameter)


def _named(function: Function, name: str) -> Function:
    """As people read it in tracebacks and in the generated code."""
    function.__name__ = name
    return function
