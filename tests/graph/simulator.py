"""All workers of a plan at once, in any order: each runs its own nodes, over real bytes in the slots that the plan
says.

It knows nothing of the passes: it does what the plan says, and compares every value that a node reads with what that
node read in one process.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tensorwire.edge.header import HEADER
from tensorwire.graph import Analysis, Edge, Graph
from tensorwire.graph.ir import GIVEN, Node
from tensorwire.graph.kinds import BOUNDED, DYNAMIC, STATIC
from tests.graph.programs import Program

WORD = 8


def kept(value: Any) -> Any:
    """A copy that nobody changes."""
    return value.copy() if isinstance(value, np.ndarray) else value


class OneProcess:
    """What one process computes: ``read`` by node and operand, ``end`` by node."""

    def __init__(self, program: Program) -> None:
        values: dict[str, Any] = {name: value.copy() for name, value in program.given.items()}
        self.read: dict[tuple[str, str], Any] = {}
        for node in program.nodes:
            if node.kind in GIVEN:
                continue
            for name in node.inputs:
                self.read[node.name, name] = kept(values[name])
            values[node.name] = program.run[node.name]([values[name] for name in node.inputs])
        self.end = values


class Worker:
    """One worker: its memory, and what it does next."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.all, self.name = simulation, name
        plan = simulation.analysis.plan
        self.outbox = np.full(dict(plan.outbox)[name], 0xAA, np.uint8)
        self.inboxes = {worker: np.full(size, 0xAA, np.uint8) for worker, size in plan.outbox}
        self.arrived: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.births: dict[str, dict[int, Edge]] = defaultdict(dict)
        for edge in plan.edges:
            if edge.source == name and edge.birthplace:
                self.births[edge.birthplace][edge.index] = edge

    def steps(self) -> Iterator[bool]:
        """Runs. Yields True after each step, False while it waits."""
        crossing, graph = self.all.analysis.crossing, self.all.graph
        for node in graph.nodes:
            if node.kind in GIVEN:
                if node.present is None or self.name in node.present:
                    self.values[node.name] = self.all.given(node, self.name)
            elif self.name in crossing.runs[node.name]:
                for name in node.inputs:
                    yield from self._wait(name)
                self._run(node)
                yield True
            if node.name in crossing.sent and crossing.sent[node.name][0] == self.name:
                self._send(self.all.edges[node.name])
                yield True
        for output in graph.outputs:
            if self.name in crossing.holds[output.name]:
                yield from self._wait(output.name)

    def _wait(self, name: str) -> Iterator[bool]:
        edge = self.all.edges.get(name)
        if edge is None or self.name not in edge.targets or name in self.values:
            return
        while name not in self.arrived:
            yield False
        self.values[name] = self._received(edge)

    def _run(self, node: Node) -> None:
        operands = [self.values[name] for name in node.inputs]
        for name, value in zip(node.inputs, operands, strict=True):
            if not isinstance(value, tuple):
                self.all.check(f"{name} on {self.name} for {node.name}", value, self.all.one.read[node.name, name])
        made = self.all.program.run[node.name](operands)
        for index, edge in self.births[node.name].items():
            if edge.kind == DYNAMIC:  # in memory that no slot is for
                continue
            assert edge.slot is not None
            fresh = made[index] if isinstance(made, tuple) else made
            at = edge.slot + (HEADER if edge.kind == BOUNDED else 0)
            born = self.outbox[at : at + fresh.nbytes].view(np.int64)
            born[:] = fresh
            made = tuple(born if i == index else one for i, one in enumerate(made)) if isinstance(made, tuple) else born
        self.values[node.name] = made

    # ---- what comes and goes

    def _send(self, edge: Edge) -> None:
        value, at = self.values[edge.name], edge.slot
        if edge.lent:
            for target in edge.targets:
                self.all.workers[target].arrived[edge.name] = value  # where it is mapped: it must not change meanwhile
            return
        assert at is not None
        if edge.kind == DYNAMIC:
            self._send_headers(edge, at, value)
            return
        if edge.kind == STATIC:
            room = self._shown(self.outbox, edge, at + edge.offset, len(value))
            if edge.birthplace:
                assert room.ctypes.data == value.ctypes.data, f"{edge.name} was not born where the plan says"
            else:
                room[:] = value
            span = (at + edge.offset, at + edge.offset + (edge.nbytes or 0))
        else:
            values = np.atleast_1d(np.asarray(value, np.int64))
            header = HEADER if edge.kind == BOUNDED else 0
            self.outbox[at : at + header].view(np.int64)[:1] = len(values)
            self.outbox[at + header : at + header + values.nbytes].view(np.int64)[:] = values
            span = (at, at + header + values.nbytes)
        for target in edge.targets:
            self.all.transfer(self, self.all.workers[target], edge, span)

    def _send_headers(self, edge: Edge, at: int, value: Any) -> None:
        """Of a tensor of any size only headers are in the outbox: each leads to the tensor."""
        for number, target in enumerate(edge.targets):
            header = at + HEADER * number
            self.outbox[header : header + WORD].view(np.int64)[0] = len(self.all.payloads)
            self.all.payloads.append(value.copy())
            self.all.transfer(self, self.all.workers[target], edge, (header, header + HEADER))

    def _shown(self, memory: Any, edge: Edge, at: int, length: int) -> Any:
        assert edge.spec is not None
        stride = edge.spec.stride[0] if edge.spec.stride else 1
        assert isinstance(stride, int)
        extent = (length - 1) * stride + 1
        return as_strided(memory[at : at + WORD * extent].view(np.int64), (length,), (WORD * stride,))

    def _received(self, edge: Edge) -> Any:
        if edge.lent:
            return self.arrived[edge.name]
        memory, at = self.arrived[edge.name], edge.slot
        assert at is not None
        if edge.kind == DYNAMIC:
            header = at + HEADER * edge.targets.index(self.name)
            return self.all.payloads[int(memory[header : header + WORD].view(np.int64)[0])]
        if edge.spec is None:
            return int(memory[at : at + WORD].view(np.int64)[0])
        if edge.kind == BOUNDED:
            length = int(memory[at : at + WORD].view(np.int64)[0])
            return memory[at + HEADER : at + HEADER + WORD * length].view(np.int64)
        length = edge.spec.elements
        assert length is not None
        if edge.kind == STATIC:
            return self._shown(memory, edge, at + edge.offset, length)
        return memory[at : at + WORD * length].view(np.int64).copy()


class Simulation:
    """Runs ``analysis`` of ``program`` to its end. ``maps``: pairs of which the target reads the source's outbox.

    Raises `AssertionError` if a value is not the one process's, or nobody can go on.
    """

    def __init__(self, program: Program, graph: Graph, analysis: Analysis, maps: set[tuple[str, str]]) -> None:
        self.program, self.graph, self.analysis, self.maps = program, graph, analysis, maps
        self.one = OneProcess(program)
        self.edges = {edge.name: edge for edge in analysis.plan.edges}
        self.reads = dict(analysis.plan.reads)
        self.flying: dict[tuple[str, str], list[tuple[Edge, tuple[int, int]]]] = defaultdict(list)
        self.payloads: list[Any] = []  # of dynamic edges; a header says which
        self.workers = {name: Worker(self, name) for name in graph.workers}

    def given(self, node: Node, worker: str) -> Any:
        """What ``worker`` has of an input: right only if the plan says that it reads it."""
        value = self.program.given[node.name].copy()
        return value if worker in self.reads.get(node.name, (worker,)) else value * 0 - 1

    def transfer(self, source: Worker, target: Worker, edge: Edge, span: tuple[int, int]) -> None:
        """Signals what is mapped; else the bytes leave at any time from now on."""
        if (source.name, target.name) in self.maps:
            target.arrived[edge.name] = source.outbox
        else:
            self.flying[source.name, target.name].append((edge, span))

    def land(self, source: str, target: str) -> None:
        """The oldest write between them arrives."""
        edge, (begin, end) = self.flying[source, target].pop(0)
        inbox = self.workers[target].inboxes[source]
        inbox[begin:end] = self.workers[source].outbox[begin:end]
        self.workers[target].arrived[edge.name] = inbox

    def run(self, rng: random.Random) -> None:
        """Somebody goes on as far as he can or for a while, then somebody else."""
        running = {name: worker.steps() for name, worker in self.workers.items()}
        while running:
            who = rng.sample(sorted(running), len(running))
            if not sum(self._advance(running, name, rng) for name in who):
                pairs = [pair for pair in sorted(self.flying) if self.flying[pair]]
                assert pairs, f"{', '.join(running)} wait forever"
                self.land(*rng.choice(pairs))
        self._check_end()

    def _advance(self, running: dict[str, Iterator[bool]], name: str, rng: random.Random) -> bool:
        """Lets ``name`` go on for so many steps, or until it waits. Whether it went at all."""
        for count in range(rng.choice((1, 3, 1000))):
            went = next(running[name], None)
            if went is None:
                del running[name]
                return True
            if not went:
                return count > 0
        return True

    def check(self, what: str, value: Any, expected: Any) -> None:
        """Compares."""
        assert np.array_equal(value, expected), f"{what} is {value}, in one process {expected}"

    def _check_end(self) -> None:
        for name, workers in self.analysis.plan.gets:
            for worker in workers:
                self.check(f"{name} on {worker} in the end", self.workers[worker].values[name], self.one.end[name])
        for name, workers in self.analysis.plan.reads:
            for worker in workers:
                if name in self.workers[worker].values:
                    self.check(f"{name} on {worker} in the end", self.workers[worker].values[name], self.one.end[name])
