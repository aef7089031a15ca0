"""Graphs written by hand, tersely: workers are ``a``, ``b`` and so on, and every method gives back the name."""

from __future__ import annotations

from typing import Any

from tensorwire.graph import Graph, Node, Output, TensorSpec
from tensorwire.graph.ir import INPUT, ITEM, PARAMETER, SAVED

BIG = (64,)  # 256 bytes of float32: more than travels by value


class Sketch:
    """A graph in the making. ``shape=None`` makes a number."""

    def __init__(self, workers: str = "ab", name: str = "sketch") -> None:
        self.workers, self.name = tuple(workers), name
        self.nodes: list[Node] = []
        self.outputs: list[Output] = []

    def add(
        self, name: str, op: str, *inputs: str, shape: Any = BIG, stride: Any = None, offset: int = 0, **more: Any
    ) -> str:
        """Any node."""
        spec = None if shape is None else TensorSpec(shape, "float32", stride, offset)
        self.nodes.append(Node(name, op, inputs, spec=spec, **more))
        return name

    def input(self, name: str, *, on: str | None = None, shape: Any = BIG) -> str:
        """Given by the caller; on all workers unless said."""
        return self.add(name, "input", shape=shape, kind=INPUT, present=None if on is None else tuple(on))

    def parameter(self, name: str, *, on: str, shape: Any = BIG) -> str:
        """A parameter of those workers."""
        return self.add(name, "parameter", shape=shape, kind=PARAMETER, present=tuple(on))

    def saved(self, name: str, *, on: str, shape: Any = BIG) -> str:
        """What forward left on those workers."""
        return self.add(name, "saved", shape=shape, kind=SAVED, present=tuple(on))

    def op(self, name: str, *inputs: str, on: str | None = None, shape: Any = BIG, **more: Any) -> str:
        """An operator that allocates its output."""
        return self.add(name, "op", *inputs, shape=shape, worker=on, **{"fresh": True, **more})

    def view(
        self, name: str, base: str, *, on: str | None = None, shape: Any = BIG, offset: int = 0, **more: Any
    ) -> str:
        """Of ``base``'s memory."""
        return self.add(name, "view", base, shape=shape, offset=offset, worker=on, alias=base, **more)

    def write(self, name: str, into: str, *inputs: str, on: str | None = None, shape: Any = BIG) -> str:
        """An operator that changes ``into`` in place."""
        return self.add(name, "write", into, *inputs, shape=shape, worker=on, alias=into, writes=(into,))

    def several(self, name: str, *inputs: str, on: str | None = None, **more: Any) -> str:
        """An operator of several outputs."""
        return self.add(name, "several", *inputs, shape=None, worker=on, tuple_=True, **{"fresh": True, **more})

    def item(self, name: str, of: str, index: int = 0, *, shape: Any = BIG, **more: Any) -> str:
        """Output number ``index`` of it."""
        return self.add(name, "item", of, shape=shape, kind=ITEM, index=index, **more)

    def out(self, name: str, to: str = "", *, caller: bool = False) -> None:
        """``name`` outlives the graph, and goes to those workers."""
        self.outputs.append(Output(name, tuple(to), caller))

    def graph(self) -> Graph:
        """What was written."""
        return Graph(self.name, self.workers, tuple(self.nodes), tuple(self.outputs))
