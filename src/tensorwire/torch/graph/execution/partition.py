"""One worker's part of a graph as a function: its operators, and between them its sends and receives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from tensorwire.errors import Unsupported
from tensorwire.graph import Analysis
from tensorwire.torch.graph.capture.joint import Boxed, function_of
from tensorwire.torch.graph.execution.random_numbers import replay
from tensorwire.torch.graph.execution.transfers import Transfers
from tensorwire.torch.graph.placement.placeholders import kept_placeholder, length_of, shown_placeholder


class Partition:
    """Builds the function of ``me``: it takes the list of all arguments, which it empties, and returns all outputs.

    What ``me`` does not hold is None; but for outputs in ``shown``, which people see, it is a tensor of the right shape
    without memory, and with ``keeps`` an empty tensor for what is kept for the backward graph. ``changed``: by output,
    the argument that it is copied to afterwards, which stands for it where ``me`` does not hold it. With ``replays``
    random numbers are drawn for the operators of other workers, too.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        analysis: Analysis,
        me: str,
        transfers: Transfers,
        *,
        shown: Collection[str] = (),
        changed: Mapping[str, str] = MappingProxyType({}),
        keeps: bool = False,
        replays: bool = False,
    ) -> None:
        self.module, self.analysis, self.me, self.transfers = module, analysis, me, transfers
        self.shown, self.changed, self.keeps, self.replays = shown, changed, keeps, replays
        self.gets = {name for name, workers in analysis.plan.gets if me in workers}
        self.inputs = {name for name, _ in analysis.plan.reads}  # which every worker passes
        self.graph = fx.Graph()
        self.made: dict[str, fx.Node] = {}
        self.received: set[str] = set()
        self.numbers: dict[Any, fx.Node] = {}  # of symbols that the graph is given
        self.lengths: dict[Any, tuple[fx.Node, int]] = {}  # of symbols, a tensor here and its dimension of that length
        self.places = {edge.name: index for index, edge in enumerate(analysis.plan.edges)}
        self.born: dict[str, list[int]] = defaultdict(list)  # edges by their birthplace
        for index, edge in enumerate(analysis.plan.edges):
            if edge.source == me and edge.birthplace:
                self.born[edge.birthplace].append(index)

    def build(self) -> Boxed:
        """The function."""
        crossing = self.analysis.crossing
        for node in self.module.graph.nodes:
            if node.op == "output":
                self.graph.output([self._output(value) for value in node.args[0]])
            elif node.op == "placeholder":
                self._given(node)
            elif node.op == "get_attr":
                self.made[node.name] = self.graph.node_copy(node)
            elif self.me in crossing.runs[node.name]:
                self._run(node)
            elif self.replays and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                self._call(replay(node))
            sent = crossing.sent.get(node.name)
            if sent is not None and sent[0] == self.me:
                self._call(self.transfers.sender(self.places[node.name]), self.made[node.name])
        return function_of(self.graph, self.module)

    def _call(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        return self.graph.call_function(function, args)

    def _given(self, node: fx.Node) -> None:
        made = self.made[node.name] = self.graph.placeholder(node.name)
        if self._is_here(node.name):
            self._note_number(node, made)

    def _is_here(self, name: str) -> bool:
        """Whether an argument has its right shape here. Something stands for what only another worker has kept."""
        crossing = self.analysis.crossing
        received = name in crossing.sent and self.me in crossing.sent[name][1]
        return name in self.inputs or (self.me in crossing.holds[name] and not received)

    def _value(self, node: fx.Node) -> fx.Node:
        """The value of ``node`` here: made here, there from the beginning, or received now."""
        sent = self.analysis.crossing.sent.get(node.name)
        if sent is not None and self.me in sent[1] and node.name not in self.received:
            self.received.add(node.name)
            dtype = getattr(node.meta["val"], "dtype", None)
            own = (node.name, self.me) in self.analysis.plan.callers
            made = self.made[node.name] = self._call(self.transfers.receiver(self.places[node.name], dtype, own=own))
            self._note_number(node, made)
        return self.made[node.name]

    def _run(self, node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            self._value(operand)
        births = self.born.get(node.name)
        if births:
            assert isinstance(node.target, torch._ops.OpOverload)
            made = self._born(node, births)
        else:
            made = self.graph.node_copy(node, self._value)
        self.made[node.name] = made
        self._note_number(node, made)

    def _born(self, node: fx.Node, births: list[int]) -> fx.Node:
        """An operator whose outputs are born in registered memory: of a size that is known, or computed before."""
        assert isinstance(node.target, torch._ops.OpOverload)
        args = fx.map_arg(node.args, self._value)
        kwargs = fx.map_arg(node.kwargs, self._value)
        traced = node.meta["val"]
        outputs = traced if isinstance(traced, (tuple, list)) else (traced,)
        index = {self.analysis.plan.edges[edge].index: edge for edge in births}
        try:
            sizes = {edge: self._lengths(outputs[output]) for output, edge in index.items()}
        except Unsupported:  # it depends on a number that only another worker has: copied when it is sent
            return self.graph.call_function(node.target, args, kwargs)
        birth = self.transfers.birthplace(node.target, index, [outputs[output].dtype for output in index])
        return self._call(birth, list(sizes.values()), args, kwargs)

    def _lengths(self, traced: torch.Tensor) -> list[Any]:
        return [self._length(length) for length in (*traced.shape, *traced.stride())]

    def _note_number(self, node: fx.Node, made: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            self.numbers.setdefault(value.node.expr, made)
        for dim, length in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(length, torch.SymInt) and length.node.expr.is_Symbol:
                self.lengths.setdefault(length.node.expr, (made, dim))

    def _output(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if value.name in self.gets:
            return self._value(value)
        if value.name in self.changed:
            return self.made[self.changed[value.name]]
        traced = value.meta["val"]
        if value.name in self.shown:
            return self._call(shown_placeholder(traced), *self._lengths(traced))
        return self._call(kept_placeholder(traced)) if self.keeps else None

    def _length(self, length: Any) -> Any:
        """A number, or the node that computes it from numbers that are here."""
        if isinstance(length, int):
            return length
        symbols, evaluate = length_of(length, {*self.numbers, *self.lengths}, self.me)
        return self._call(evaluate, *map(self._number, symbols))

    def _number(self, symbol: Any) -> fx.Node:
        """The value of a symbol: a number that is here, or the length of a tensor that is."""
        if symbol not in self.numbers:
            made, dim = self.lengths[symbol]
            self.numbers[symbol] = self._call(torch.ops.aten.sym_size.int, made, dim)
        return self.numbers[symbol]
