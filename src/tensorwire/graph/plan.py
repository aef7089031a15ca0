"""The plan on which all processes agree before a graph runs. Plain, frozen, printable, with a digest."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from tensorwire.graph.ir import TensorSpec
from tensorwire.graph.kinds import VALUE
from tensorwire.graph.passes.copying import Copies, predicted


@dataclass(frozen=True, slots=True)
class Edge:
    """One value that crosses, once to each of ``targets``.

    Attributes:
        name: The value.
        source: The worker that sends it.
        targets: The workers that receive it.
        kind: The kind of edge.
        spec: The tensor; None for a number.
        nbytes: Bytes of payload, at most; None where nothing bounds it.
        birthplace: The operator whose output it is born as; empty where it is copied.
        index: Which output of that operator.
        copied: Why it is copied; empty where it is born.
        slot: Where its memory begins in the outbox of ``source``; None: it is lent. Of a tensor of any size only
            headers lie there, one per target.
        offset: Bytes from there to its first element.
        lent: It is a parameter, which lives in registered memory of its own and is only read during a run.
        if_small: If it has more than ``nbytes`` in a run, only the header is sent.
        header: Where in the outbox the source describes a tensor that does not lie as ``spec`` and ``offset`` say; None
            where every run has a header, or needs none.
    """

    name: str
    source: str
    targets: tuple[str, ...]
    kind: str
    spec: TensorSpec | None
    nbytes: int | None
    birthplace: str
    index: int
    copied: str
    slot: int | None
    offset: int
    lent: bool = False
    if_small: bool = False
    header: int | None = None

    def __str__(self) -> str:
        what = "a number" if self.spec is None else str(self.spec)
        size = "of any size" if self.nbytes is None else f"{self.nbytes} bytes"
        origin = f"born in {self.birthplace}" if self.birthplace else f"copied: {self.copied}"
        if self.birthplace and self.index:
            origin += f" as output {self.index}"
        if self.kind == VALUE:
            origin = "by value"
        elif self.lent:
            origin = "lent"
        elif self.if_small:
            size = f"if it has up to {size}"
        where = "" if self.slot is None else f", at {self.slot}+{self.offset}"
        return f"{self.name}: {self.source} -> {', '.join(self.targets)}: {what}, {self.kind}, {size}{where}, {origin}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """What crosses from ``source`` to ``target`` in one run: so many edges, of ``nbytes`` of payload at most, besides
    ``unbounded`` edges of any size. Of the others ``born`` and ``lent`` cost no copy, ``copied`` one, ``values`` go by
    value."""

    source: str
    target: str
    edges: int
    nbytes: int
    born: int
    lent: int
    copied: int
    values: int
    unbounded: int


@dataclass(frozen=True)
class Plan:
    """What runs where, what crosses, and where that lies.

    Attributes:
        name: The graph's name.
        workers: The workers.
        nodes: By name, the operator and the workers that it runs on.
        edges: What crosses.
        gets: The workers that get each value that outlives the graph.
        reads: The workers whose caller has to pass the right value of each input.
        outbox: Bytes of one outbox per worker.
        callers: The values that a worker copies when it has received them, because its user may change them.
    """

    name: str
    workers: tuple[str, ...]
    nodes: tuple[tuple[str, str, tuple[str, ...]], ...]
    edges: tuple[Edge, ...]
    gets: tuple[tuple[str, tuple[str, ...]], ...]
    reads: tuple[tuple[str, tuple[str, ...]], ...]
    outbox: tuple[tuple[str, int], ...]
    callers: frozenset[tuple[str, str]]

    @cached_property
    def loans(self) -> frozenset[tuple[str, str]]:
        """Who lends parameters to whom."""
        return frozenset((edge.source, target) for edge in self.edges if edge.lent for target in edge.targets)

    @cached_property
    def siblings(self) -> frozenset[str]:
        """The edges that are born in memory which another edge is born in, too."""
        births = Counter((edge.birthplace, edge.index) for edge in self.edges)
        return frozenset(e.name for e in self.edges if e.birthplace and births[e.birthplace, e.index] > 1)

    @cached_property
    def text(self) -> str:
        """All of it in lines: what processes compare, and what people see where they differ."""
        lines = [f"graph {self.name} on {', '.join(self.workers)}"]
        lines += [f"edge {edge}" for edge in self.edges]
        lines += [f"outbox {worker}: {nbytes} bytes" for worker, nbytes in self.outbox]
        lines += [f"output {name}: {', '.join(workers)}" for name, workers in self.gets]
        lines += [f"input {name}: {', '.join(workers)}" for name, workers in self.reads]
        lines += [f"{name} = {op}: {', '.join(workers)}" for name, op, workers in self.nodes]
        return "\n".join(lines)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).digest()

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """Of each pair of workers between which something crosses, in the order of the workers."""
        pairs: dict[tuple[str, str], list[Edge]] = {}
        for edge in self.edges:
            for target in edge.targets:
                pairs.setdefault((edge.source, target), []).append(edge)
        both = ((source, target) for source in self.workers for target in self.workers)
        return tuple(_traffic(*pair, pairs[pair]) for pair in both if pair in pairs)

    @cached_property
    def copies(self) -> tuple[Copies, ...]:
        """What each worker copies in one run in the steady state."""
        return predicted(self.workers, self.edges, self.callers)

    @property
    def inboxes(self) -> dict[tuple[str, str], int]:
        """Bytes of registered memory, a bank, that the second worker of a pair has for the first one's outbox, where it
        cannot map that."""
        outbox = dict(self.outbox)
        boxed = {(edge.source, target) for edge in self.edges if edge.slot is not None for target in edge.targets}
        pairs = ((one.source, one.target) for one in self.traffic)
        return {pair: outbox[pair[0]] for pair in pairs if pair in boxed}

    @property
    def lent(self) -> dict[str, int]:
        """Bytes of registered memory, by worker, that parameters live in because they are lent."""
        found: dict[str, int] = {}
        for edge in self.edges:
            if edge.lent:
                found[edge.source] = found.get(edge.source, 0) + (edge.nbytes or 0)
        return found

    def to_json(self) -> dict[str, Any]:
        """Writes the plan as plain data.

        Returns:
            All of it, with its totals, as dicts, lists, strings and numbers.
        """
        inboxes = [{"worker": target, "of": source, "nbytes": n} for (source, target), n in self.inboxes.items()]
        return {
            "name": self.name,
            "digest": self.digest.hex(),
            "workers": list(self.workers),
            "edges": msgspec.to_builtins(self.edges),
            "traffic": msgspec.to_builtins(self.traffic),
            "copies": msgspec.to_builtins(self.copies),
            "outboxes": [{"worker": worker, "nbytes": nbytes} for worker, nbytes in self.outbox],
            "inboxes": inboxes,
            "lent": [{"worker": worker, "nbytes": nbytes} for worker, nbytes in self.lent.items()],
            "outputs": [{"name": name, "workers": list(workers)} for name, workers in self.gets],
            "inputs": [{"name": name, "workers": list(workers)} for name, workers in self.reads],
            "nodes": [{"name": name, "op": op, "workers": list(workers)} for name, op, workers in self.nodes],
        }


def _traffic(source: str, target: str, edges: Sequence[Edge]) -> Traffic:
    values = sum(edge.kind == VALUE for edge in edges)
    born = sum(edge.birthplace != "" for edge in edges)
    unbounded = sum(edge.nbytes is None for edge in edges)
    nbytes = sum(edge.nbytes or 0 for edge in edges)
    lent = sum(edge.lent for edge in edges)
    copied = len(edges) - born - lent - values
    return Traffic(source, target, len(edges), nbytes, born, lent, copied, values, unbounded)
