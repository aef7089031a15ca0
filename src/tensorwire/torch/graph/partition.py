"""One host's part of a graph as a function of its own: its operators, and between them what comes and goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tensorwire.graph import Analysis
from tensorwire.torch.graph.post import Post

Boxed = Callable[[list[Any]], Any]


def partition(module: fx.GraphModule, analysis: Analysis, me: str, post: Post, stands_in: bool) -> Boxed:
    """The function of ``me``: takes the list of all arguments, which it empties, and returns all outputs.

    What ``me`` does not hold is None or, with ``stands_in``, a tensor of the right shape without memory.
    """
    return _Builder(module, analysis, me, post, stands_in).build()


class _Builder:
    def __init__(self, module: fx.GraphModule, analysis: Analysis, me: str, post: Post, stands_in: bool) -> None:
        self.module, self.analysis, self.me, self.post, self.stands_in = module, analysis, me, post, stands_in
        self.graph = fx.Graph()
        self.made: dict[str, fx.Node] = {}
        self.received: set[str] = set()
        self.places = {edge.name: index for index, edge in enumerate(analysis.plan.edges)}
        self.born: dict[str, list[int]] = defaultdict(list)  # edges by their birthplace
        for index, edge in enumerate(analysis.plan.edges):
            if edge.source == me and edge.birthplace:
                self.born[edge.birthplace].append(index)

    def build(self) -> Boxed:
        crossing = self.analysis.crossing
        for node in self.module.graph.nodes:
            if node.op == "output":
                self.graph.output([self._output(value) for value in node.args[0]])
            elif node.op == "placeholder":
                self.made[node.name] = self.graph.placeholder(node.name)
            elif node.op == "get_attr":
                self.made[node.name] = self.graph.node_copy(node)
            elif self.me in crossing.runs[node.name]:
                self._run(node)
            if node.op == "placeholder" and self.me not in crossing.holds[node.name]:
                continue
            sent = crossing.sent.get(node.name)
            if sent is not None and sent[0] == self.me:
                self._call(self.post.sender(self.places[node.name]), self.made[node.name])
        self.graph.set_codegen(fx.graph._BoxedCodeGen())
        built = fx.GraphModule(self.module, self.graph)
        return built.forward

    def _call(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        return self.graph.call_function(function, args)

    def _value(self, node: fx.Node) -> fx.Node:
        """The value of ``node`` here: made here, there from the beginning, or received now."""
        sent = self.analysis.crossing.sent.get(node.name)
        if sent is not None and self.me in sent[1] and node.name not in self.received:
            self.received.add(node.name)
            self.made[node.name] = self._call(self.post.receiver(self.places[node.name], node.meta.get("val")))
        return self.made[node.name]

    def _run(self, node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            self._value(operand)
        births = self.born.get(node.name)
        if births:
            assert isinstance(node.target, torch._ops.OpOverload)
            args = fx.map_arg(node.args, self._value)
            kwargs = fx.map_arg(node.kwargs, self._value)
            made = self.graph.call_function(self.post.birthplace(node.target, births), args, kwargs)
        else:
            made = self.graph.node_copy(node, self._value)
        self.made[node.name] = made

    def _output(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if self.me in self.analysis.crossing.holds[value.name]:
            return self._value(value)
        return self._call(self.post.stand_in(value.meta.get("val"))) if self.stands_in else None
