"""The plan: what every process has to agree on before a graph runs. Plain, frozen, printable, with a digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

from tensorwire.edge.tensor import DTYPES
from tensorwire.graph.birth import Aliases, Birth, births, callers
from tensorwire.graph.crossing import Crossings, crossings
from tensorwire.graph.homes import homes
from tensorwire.graph.ir import CALL, INPUT, ITEM, PARAMETER, Graph, TensorSpec
from tensorwire.graph.kinds import BY_VALUE, DYNAMIC, STATIC, VALUE, kind_of
from tensorwire.graph.slots import layout

PREFIX = 128  # bytes in front of a tensor whose shape varies: its lengths and strides


@dataclass(frozen=True, slots=True)
class Edge:
    """One value that crosses, once to each of ``targets``.

    ``nbytes``: of payload, at most; None where nothing bounds it. ``birthplace``: the operator whose output number
    ``index`` it is born as, empty where it is copied for the reason ``copied``. ``slot``: where its memory begins in
    the outbox of ``source`` (None: elsewhere), and ``offset``: bytes from there to its first element. ``lent``: it is a
    parameter, which lives in registered memory of its own, and is only read during a run.
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

    def __str__(self) -> str:
        what = "a number" if self.spec is None else str(self.spec)
        size = "of any size" if self.nbytes is None else f"{self.nbytes} bytes"
        origin = f"born in {self.birthplace}" if self.birthplace else f"copied: {self.copied}"
        if self.kind == VALUE:
            origin = "by value"
        elif self.lent:
            origin = "lent"
        where = "" if self.slot is None else f", at {self.slot}+{self.offset}"
        return f"{self.name}: {self.source} -> {', '.join(self.targets)}: {what}, {self.kind}, {size}{where}, {origin}"


@dataclass(frozen=True)
class Plan:
    """What runs where, what crosses, and where that lies.

    ``nodes``: by name, operator and the hosts it runs on. ``gets``: the hosts that get each value that outlives the
    graph. ``reads``: the hosts that need right values of each input. ``outbox``: bytes of one outbox by host.
    ``callers``: the values that a host copies when it has received them, as its user gets them, who may change them.
    """

    name: str
    hosts: tuple[str, ...]
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
    def text(self) -> str:
        """All of it in lines: what processes compare, and what people see where they differ."""
        lines = [f"graph {self.name} on {', '.join(self.hosts)}"]
        lines += [f"edge {edge}" for edge in self.edges]
        lines += [f"outbox {host}: {nbytes} bytes" for host, nbytes in self.outbox]
        lines += [f"output {name}: {', '.join(hosts)}" for name, hosts in self.gets]
        lines += [f"input {name}: {', '.join(hosts)}" for name, hosts in self.reads]
        lines += [f"{name} = {op}: {', '.join(hosts)}" for name, op, hosts in self.nodes]
        return "\n".join(lines)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).digest()


@dataclass(frozen=True)
class Analysis:
    """The plan, and what an executor needs besides: by name, where operators run and where values are."""

    plan: Plan
    crossing: Crossings


def analyze(graph: Graph, default: str | None = None, *, copies: bool = False) -> Analysis:
    """Runs all passes. ``default``: the host of what nothing binds. ``copies``: nothing is born in registered memory,
    and nothing lent; all is copied there, to compare with.

    Raises `ArgumentError` for a value that is needed and that no host has.
    """
    crossing = crossings(graph, homes(graph, default))
    aliases = Aliases(graph)
    birth = births(graph, crossing, aliases)
    if copies:
        birth = {name: Birth(found.root, why=found.why or "it was asked for") for name, found in birth.items()}
    written = {aliases.root(name) for node in graph.nodes for name in node.writes}
    drafts = {name: _draft(graph, crossing, birth[name], name, copies or name in written) for name in crossing.sent}
    sizes = {name: _slot_bytes(graph, edge) for name, edge in drafts.items() if edge.kind != DYNAMIC and not edge.lent}
    slots = layout(graph, crossing, birth, aliases, sizes)
    edges = tuple(replace(edge, slot=slots.at.get(name)) for name, edge in drafts.items())
    given = callers(graph, crossing, aliases)
    own = ((name, host) for name, (_, targets) in crossing.sent.items() for host in targets)
    copied = frozenset((name, host) for name, host in own if (aliases.root(name), host) in given)
    return Analysis(_plan(graph, crossing, edges, slots.nbytes, copied), crossing)


def _draft(graph: Graph, crossing: Crossings, birth: Birth, name: str, written: bool) -> Edge:
    node = graph.node(name)
    kind = kind_of(node.spec)
    source, targets = crossing.sent[name]
    copied, birthplace, offset = birth.why, birth.operator or "", 0
    if birthplace:
        root = graph.node(birth.root)
        if kind != STATIC or root.spec is None or not root.spec.static:
            copied, birthplace = "its size varies" if kind != VALUE else "it is small", ""
        elif node.spec is not None and isinstance(node.spec.offset, int):
            offset = node.spec.offset * DTYPES[node.spec.dtype]
    nbytes = 8 if node.spec is None else node.spec.nbytes
    lent = node.kind == PARAMETER and kind == STATIC and not written
    return Edge(name, source, targets, kind, node.spec, nbytes, birthplace, birth.index, copied, None, offset, lent)


def _slot_bytes(graph: Graph, edge: Edge) -> int:
    if edge.kind == VALUE:
        return BY_VALUE
    assert edge.nbytes is not None
    if edge.kind != STATIC:
        return PREFIX + edge.nbytes
    if not edge.birthplace:
        return edge.nbytes
    root = graph.node(edge.name)
    while root.alias is not None:
        root = graph.node(root.alias)
    nbytes = None if root.spec is None else root.spec.nbytes
    assert nbytes is not None, root  # only what has a size is born
    return nbytes


def _plan(
    graph: Graph,
    crossing: Crossings,
    edges: tuple[Edge, ...],
    outbox: dict[str, int],
    copied: frozenset[tuple[str, str]],
) -> Plan:
    def ordered(hosts: frozenset[str]) -> tuple[str, ...]:
        return tuple(host for host in graph.hosts if host in hosts)

    readers: dict[str, set[str]] = {node.name: set() for node in graph.nodes if node.kind == INPUT}
    for node in graph.nodes:
        for name in node.inputs:
            if name in readers:
                readers[name] |= crossing.runs.get(node.name, frozenset())
    return Plan(
        graph.name,
        graph.hosts,
        tuple((n.name, n.op, ordered(crossing.runs[n.name])) for n in graph.nodes if n.kind in (CALL, ITEM)),
        edges,
        tuple((output.name, ordered(frozenset(output.to) or crossing.holds[output.name])) for output in graph.outputs),
        tuple((name, ordered(frozenset(hosts))) for name, hosts in readers.items()),
        tuple(sorted(outbox.items())),
        copied,
    )
