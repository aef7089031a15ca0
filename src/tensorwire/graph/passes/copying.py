"""The number of payload copies of a run, predicted from the edges' fields that decide at run time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorwire.edge.tensor import DTYPES
from tensorwire.graph.kinds import VALUE

if TYPE_CHECKING:
    from tensorwire.graph.plan import Edge


@dataclass(frozen=True, slots=True)
class Copies:
    """What ``worker`` copies in one run in the steady state.

    ``sent``: copies of what it sends and what was not born in registered memory. ``received``: copies of what it
    receives for its caller, who may keep and change it. ``count``: both. ``nbytes``: bytes of the copies whose size is
    known before; ``unbounded``: how many others there are, of any size. Of a tensor that crosses only while
    it is small there are at most as many.
    """

    worker: str
    count: int
    sent: int
    received: int
    nbytes: int
    unbounded: int


def predicted(
    workers: Sequence[str], edges: Iterable[Edge], callers: Collection[tuple[str, str]]
) -> tuple[Copies, ...]:
    """Of each worker that copies anything. ``callers``: by value and worker, what a worker receives for its caller."""
    sent: dict[str, list[Edge]] = {worker: [] for worker in workers}
    received: dict[str, list[Edge]] = {worker: [] for worker in workers}
    for edge in edges:
        if edge.kind == VALUE:  # it has no memory of its own to be copied to
            continue
        if not edge.birthplace and not edge.lent:
            sent[edge.source].append(edge)
        for worker in edge.targets:
            if edge.if_small or (edge.name, worker) in callers:
                received[worker].append(edge)
    return tuple(
        _copies(worker, sent[worker], received[worker]) for worker in workers if sent[worker] or received[worker]
    )


def _copies(worker: str, sent: Sequence[Edge], received: Sequence[Edge]) -> Copies:
    sizes = [_nbytes(edge) for edge in (*sent, *received)]
    known = [size for size in sizes if size is not None]
    return Copies(worker, len(sizes), len(sent), len(received), sum(known), len(sizes) - len(known))


def _nbytes(edge: Edge) -> int | None:
    """Of its elements, at most: gaps between them are not copied."""
    if edge.if_small:
        return edge.nbytes
    elements = None if edge.spec is None else edge.spec.elements
    return None if elements is None or edge.spec is None else elements * DTYPES[edge.spec.dtype]
