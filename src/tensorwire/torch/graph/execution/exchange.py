"""Every worker sends a few numbers to all others, for global values such as a norm."""

from __future__ import annotations

import numpy

from tensorwire._native import Hold
from tensorwire.graph import analyze
from tensorwire.graph.ir import CALL, Graph, Node, Output, TensorSpec
from tensorwire.graph.worker_group import WorkerGroup

Vector = numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]]


class Exchange:
    """For ``count`` numbers of each worker. All workers of ``group`` make theirs in the same order, and use it as
    often.
    """

    def __init__(self, group: WorkerGroup, name: str, count: int) -> None:
        spec = TensorSpec((max(count, 16),), "float64")  # so large that it has a slot of its own
        nodes = [Node(worker, name, kind=CALL, spec=spec, worker=worker, fresh=True) for worker in group.workers]
        outputs = [Output(worker, group.workers) for worker in group.workers]
        plan = analyze(Graph(f"{group.next_number} ({name})", group.workers, tuple(nodes), tuple(outputs))).plan
        self._me, self._count = group.me, count
        self._group = group.connect(plan)
        self._edges = {edge.source: index for index, edge in enumerate(plan.edges)}

    def all(self, mine: Vector) -> dict[str, Vector]:
        """The numbers of every worker, ``mine`` among them. Raises `PeerLost` or `WaitTimeout`."""
        if not self._edges:
            return {self._me: mine}
        group = self._group
        group.begin()
        assert group.held is not None
        index = self._edges[self._me]
        self._vector(group.held, index)[:] = mine
        nbytes = group.edges[index].nbytes
        assert nbytes is not None
        group.send(index, nbytes)
        found = {self._me: mine}
        for worker, edge in self._edges.items():
            if worker != self._me:
                found[worker] = self._vector(group.receive(edge), edge).copy()
        group.end()
        return found

    def _vector(self, held: Hold, index: int) -> Vector:
        slot = self._group.edges[index].slot
        assert slot is not None
        return numpy.frombuffer(memoryview(held), numpy.float64, self._count, slot)
