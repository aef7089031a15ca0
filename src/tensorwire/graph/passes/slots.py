"""The place of each tensor in a worker's outbox. Slots are reused within a step once all readers are done with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tensorwire.graph.ir import Graph
from tensorwire.graph.kinds import DYNAMIC, kind_of
from tensorwire.graph.passes.aliases import Aliases
from tensorwire.graph.passes.births import Birth
from tensorwire.graph.passes.causality import Clock, walk
from tensorwire.graph.passes.crossing import Crossings
from tensorwire.graph.passes.space import Space
from tensorwire.sizes import round_up

ALIGNMENT = 64  # bytes: what vector instructions and TensorFlow ask for
PAGE = 4096
FOREVER = 1 << 62


@dataclass(frozen=True)
class SlotLayout:
    """``at``: the offset of each sent value's memory in its source's outbox. ``nbytes``: of
    all that lies in each outbox."""

    at: dict[str, int]
    nbytes: dict[str, int]


@dataclass
class _Allocation:
    """One piece of memory: what lies there, and until when each worker uses it."""

    source: str
    begin: int  # the place in the order from which it is filled
    nbytes: int
    names: list[str] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    offset: int = 0


class _Outbox:
    """The memory in use of a worker's outbox. An allocation ends once its worker knows that all are done with it.

    Each is watched at one worker that may not be done; when that one is, at the next. So a move costs a logarithm.
    """

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.space = Space()
        self._watched: dict[str, list[tuple[int, int, _Allocation]]] = defaultdict(list)  # heaps, by last use
        self._number = 0  # so that no two entries of a heap are equal

    def enter(self, allocation: _Allocation, place: int, clock: Clock) -> None:
        """Gives ``allocation`` a slot at ``place`` of the order, when its worker knows ``clock``."""
        for worker, heap in list(self._watched.items()):
            while heap and heap[0][0] < self._done(worker, place, clock):
                self._watch(heappop(heap)[2], place, clock)
        allocation.offset = self.space.allocate(allocation.nbytes)
        self._watch(allocation, place, clock)

    def _done(self, worker: str, place: int, clock: Clock) -> int:
        """The place before which ``worker`` is done with all."""
        return place if worker == self.worker else clock[worker] + 1

    def _watch(self, allocation: _Allocation, place: int, clock: Clock) -> None:
        """Watches a worker that may not be done with it; if there is none, its memory is free."""
        for worker, last in allocation.last.items():
            if last >= self._done(worker, place, clock):
                self._number += 1
                heappush(self._watched[worker], (last, self._number, allocation))
                return
        self.space.free(allocation.offset, allocation.nbytes)


def layout(
    graph: Graph, crossing: Crossings, birth: Mapping[str, Birth], aliases: Aliases, sizes: Mapping[str, int]
) -> SlotLayout:
    """Places every value in ``sizes``: the bytes, by name, of each that lies in an outbox."""
    begins: dict[int, list[_Allocation]] = defaultdict(list)
    for allocation in _allocations(graph, crossing, birth, aliases, sizes):
        begins[allocation.begin].append(allocation)
    outboxes = {worker: _Outbox(worker) for worker in graph.workers}
    at: dict[str, int] = {}
    for place, knows in walk(graph, crossing):
        for allocation in begins.get(place, ()):
            outboxes[allocation.source].enter(allocation, place, knows[allocation.source])
            at.update(dict.fromkeys(allocation.names, allocation.offset))
    return SlotLayout(at, {worker: outbox.space.nbytes for worker, outbox in outboxes.items()})


def _allocations(
    graph: Graph, crossing: Crossings, birth: Mapping[str, Birth], aliases: Aliases, sizes: Mapping[str, int]
) -> list[_Allocation]:
    """Values that are born as one output share its memory; what is copied has memory of its own."""
    last = _last_uses(graph, crossing, aliases)
    found: dict[tuple[str, str, bool], _Allocation] = {}
    for name, nbytes in sizes.items():
        source, targets = crossing.sent[name]
        root, born = birth[name].root, birth[name].operator
        if kind_of(graph.node(name).spec) == DYNAMIC:
            born = None  # its payload lies in a pool: only its headers lie here
        key = (source, root if born else name, born is not None)
        allocation = found.get(key)
        if allocation is None:
            allocation = found[key] = _Allocation(source, graph.place[born or name], round_up(nbytes, ALIGNMENT))
        allocation.names.append(name)
        allocation.last[source] = max(allocation.last.get(source, -1), graph.place[name])
        for worker in (*targets, *((source,) if born else ())):
            allocation.last[worker] = max(allocation.last.get(worker, -1), last.get((root, worker), -1))
    return list(found.values())


def _last_uses(graph: Graph, crossing: Crossings, aliases: Aliases) -> dict[tuple[str, str], int]:
    """By root and worker, the place of the last operator there that uses any view of it."""
    last: dict[tuple[str, str], int] = {}
    for place, node in enumerate(graph.nodes):
        for worker in crossing.runs.get(node.name, ()):
            for name in node.inputs:
                last[aliases.root(name).name, worker] = place
    for output in graph.outputs:
        wishing = crossing.sent[output.name][1] if output.name in crossing.if_small else ()
        for worker in (*crossing.holds[output.name], *wishing):
            last[aliases.root(output.name).name, worker] = FOREVER
    return last
