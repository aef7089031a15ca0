"""From a graph to its plan: all passes in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tensorwire.edge.header import HEADER
from tensorwire.graph.ir import CALL, INPUT, ITEM, Graph
from tensorwire.graph.kinds import BOUNDED, BY_VALUE, DYNAMIC, SMALL, STATIC, VALUE, kind_of
from tensorwire.graph.passes.aliases import Aliases
from tensorwire.graph.passes.assignment import assign
from tensorwire.graph.passes.births import Birth, births, callers
from tensorwire.graph.passes.crossing import Crossings, crossings
from tensorwire.graph.passes.slots import PAGE, layout
from tensorwire.graph.plan import Edge, Plan
from tensorwire.sizes import round_up

NUMBER = 8  # bytes of a number that is not a tensor


@dataclass(frozen=True)
class Analysis:
    """What an executor needs.

    Attributes:
        plan: The plan.
        crossing: By name, where operators run and where values are.
    """

    plan: Plan
    crossing: Crossings


def analyze(graph: Graph, default: str | None = None, *, copies: bool = False) -> Analysis:
    """Plans what runs where, what crosses, and where that lies.

    Args:
        graph: What all workers run together.
        default: The worker of what nothing binds.
        copies: Copies all tensors into registered memory instead of allocating or lending them there, for comparisons.

    Returns:
        The plan, and what crosses.

    Raises:
        ArgumentError: A value is needed that no worker has, or is read on a worker after it was changed in place on
            another.
    """
    aliases = Aliases(graph)  # which values share memory
    runs = assign(graph, default, aliases)  # which worker runs which operator
    crossing = crossings(graph, runs, aliases)  # what crosses, from whom to whom
    birth = births(graph, crossing, aliases)  # the operator that can make it in registered memory
    if copies:
        birth = {name: Birth(found.root, why=found.why or "it was asked for") for name, found in birth.items()}
    edges = [_planned_edge(graph, crossing, birth[name], name) for name in crossing.sent]
    sizes = {edge.name: _slot_bytes(edge, birth[edge.name]) for edge in edges if not edge.lent}
    slots = layout(graph, crossing, birth, aliases, sizes)  # where it lies in the outbox of its worker
    edges = [replace(edge, slot=slots.at.get(edge.name)) for edge in edges]
    described, outbox = _with_headers(edges, slots.nbytes)
    given = callers(graph, crossing, aliases)  # what a user gets, and may change: copied when it is received
    received = ((name, worker) for name, (_, targets) in crossing.sent.items() for worker in targets)
    copied = frozenset((name, worker) for name, worker in received if (aliases.root(name).name, worker) in given)
    return Analysis(_plan(graph, crossing, described, outbox, copied), crossing)


def _planned_edge(graph: Graph, crossing: Crossings, birth: Birth, name: str) -> Edge:
    spec = graph.node(name).spec
    nbytes = NUMBER if spec is None else spec.nbytes
    source, targets = crossing.sent[name]
    born = birth.operator or ""
    kind, offset = kind_of(spec), birth.offset
    if_small = name in crossing.if_small
    if if_small:
        kind, nbytes = BOUNDED, SMALL
    return Edge(
        name, source, targets, kind, spec, nbytes, born, birth.index, birth.why, None, offset, birth.lent, if_small
    )


def _with_headers(edges: Sequence[Edge], outbox: dict[str, int]) -> tuple[tuple[Edge, ...], dict[str, int]]:
    """The edges, those that rely on their spec with room for a header after the slots; and bytes of each outbox.

    An operator may make other strides than its trace said: operators downstream compute the bits of one process only
    with the strides that are really there. So a source describes what differs, and moves nothing.
    """
    found, ends = [], dict(outbox)
    for edge in edges:
        if edge.spec is not None and edge.slot is not None and edge.kind in (STATIC, VALUE):
            found.append(replace(edge, header=ends[edge.source]))
            ends[edge.source] += HEADER
        else:
            found.append(edge)
    return tuple(found), {worker: round_up(nbytes, PAGE) for worker, nbytes in ends.items()}


def _slot_bytes(edge: Edge, birth: Birth) -> int:
    if edge.kind == VALUE:
        return HEADER if edge.spec is None else BY_VALUE
    if edge.kind == DYNAMIC:
        return HEADER * len(edge.targets)
    assert edge.nbytes is not None
    if edge.kind != STATIC:
        return HEADER + edge.nbytes
    return birth.nbytes if edge.birthplace else edge.nbytes


def _plan(
    graph: Graph,
    crossing: Crossings,
    edges: tuple[Edge, ...],
    outbox: dict[str, int],
    copied: frozenset[tuple[str, str]],
) -> Plan:
    def ordered(workers: frozenset[str]) -> tuple[str, ...]:
        return tuple(worker for worker in graph.workers if worker in workers)

    inputs = [node.name for node in graph.nodes if node.kind == INPUT]
    received = {edge.name: frozenset(edge.targets) for edge in edges}
    reads = {name: crossing.holds[name] - received.get(name, frozenset()) for name in inputs}
    return Plan(
        graph.name,
        graph.workers,
        tuple((n.name, n.op, ordered(crossing.runs[n.name])) for n in graph.nodes if n.kind in (CALL, ITEM)),
        edges,
        tuple((output.name, ordered(frozenset(output.to) or crossing.holds[output.name])) for output in graph.outputs),
        tuple((name, ordered(workers)) for name, workers in reads.items()),
        tuple(sorted(outbox.items())),
        copied,
    )
