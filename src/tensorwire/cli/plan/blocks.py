"""A plan in few words, for people: consecutive operators of one worker are a block, and arrows go from block to
block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tensorwire.graph import Analysis, Edge
from tensorwire.graph.ir import GIVEN, Graph, Node
from tensorwire.graph.kinds import VALUE

BORN, LENT, COPIED, BY_VALUE = "born", "lent", "copied", "by value"


@dataclass
class Block:
    """Operators of ``worker`` that run one after the other. ``level``: how many blocks come before it, at least.
    ``labels``: the modules that they belong to, in order; ``ops``: how often each operator is there."""

    worker: str
    level: int
    sends: bool = False
    receives: bool = False
    labels: list[str] = field(default_factory=list)
    ops: Counter[str] = field(default_factory=Counter)

    def add(self, node: Node, label: str | None) -> None:
        """One more operator."""
        self.ops[node.op] += 1
        if label is not None and label not in self.labels:
            self.labels.append(label)


@dataclass(frozen=True)
class Arrow:
    """What goes from one block to another in one ``manner``."""

    source: Block
    target: Block
    manner: str
    edges: tuple[Edge, ...]


def manner(edge: Edge) -> str:
    """How it is sent."""
    if edge.kind == VALUE:
        return BY_VALUE
    return LENT if edge.lent else BORN if edge.birthplace else COPIED


def fold(graph: Graph, analysis: Analysis, labels: Mapping[str, str]) -> tuple[list[Block], list[Arrow]]:
    """The blocks in order, and the arrows between them, each to a block of a higher level."""
    return _Folder(graph, analysis, labels).fold()


class _Folder:
    def __init__(self, graph: Graph, analysis: Analysis, labels: Mapping[str, str]) -> None:
        self.graph, self.crossing, self.labels = graph, analysis.crossing, labels
        self.edges = {edge.name: edge for edge in analysis.plan.edges}
        self.blocks: list[Block] = []
        self.current: dict[str, Block] = {}
        self.sender: dict[str, Block] = {}  # by the value that is sent
        self.received: set[tuple[str, str]] = set()
        self.arrows: dict[tuple[int, int, str], tuple[Block, Block, list[Edge]]] = {}

    def fold(self) -> tuple[list[Block], list[Arrow]]:
        for node in self.graph.nodes:
            for worker in () if node.kind in GIVEN else self.graph.workers:
                if worker in self.crossing.runs[node.name]:
                    for name in node.inputs:
                        self._receive(name, worker)
                    self._current(worker).add(node, self.labels.get(node.name))
            if node.name in self.edges:
                block = self.sender[node.name] = self._current(self.edges[node.name].source)
                block.sends = True
        for output in self.graph.outputs:
            for worker in self.graph.workers:
                if worker in self.crossing.holds[output.name]:
                    self._receive(output.name, worker)
        arrows = [Arrow(one, other, how, tuple(edges)) for (_, _, how), (one, other, edges) in self.arrows.items()]
        return self.blocks, arrows

    def _current(self, worker: str) -> Block:
        if worker not in self.current:
            self._start(worker, 0)
        return self.current[worker]

    def _start(self, worker: str, level: int) -> None:
        self.current[worker] = Block(worker, level)
        self.blocks.append(self.current[worker])

    def _receive(self, name: str, worker: str) -> None:
        """A new block begins where a worker, having sent something, waits for what was sent no earlier."""
        edge = self.edges.get(name)
        if edge is None or worker not in edge.targets or (name, worker) in self.received:
            return
        self.received.add((name, worker))
        source = self.sender[name]
        target = self._current(worker)
        if source.level >= target.level:
            if target.sends:
                self._start(worker, source.level + 1)
            target = self.current[worker]
            target.level = source.level + 1
        target.receives = True
        key = (id(source), id(target), manner(edge))
        self.arrows.setdefault(key, (source, target, []))[2].append(edge)
