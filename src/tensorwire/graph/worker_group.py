"""The workers of a job, for its graphs: all make the same plans in the same order, or the job ends."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tensorwire.control import Member
from tensorwire.device import Device
from tensorwire.edge import Pool
from tensorwire.edge.group import EdgeGroup
from tensorwire.edge.peers import Peers
from tensorwire.errors import PlanMismatch
from tensorwire.graph.ir import worker_name
from tensorwire.graph.plan import Plan

MOST_DYNAMIC = 1 << 40  # bytes of a pool: as much as there is memory
_OVER = 1 << 62  # the number of a plan that nobody makes: a worker that says it runs no graph any more


class WorkerGroup:
    """All workers of a job, called ``worker 0``, ``worker 1`` and so on. ``timeout``: seconds that one may wait for the
    others.

    ``made``: all plans so far, and their edges. ``make_edges(plan, number, peers)``: what makes the edges of a plan
    instead of `EdgeGroup`, for a benchmark.
    """

    def __init__(self, member: Member, workers: int, timeout: float) -> None:
        self.member, self.timeout = member, timeout
        self.workers = tuple(map(worker_name, range(workers)))
        self.me = worker_name(member.index)
        self.make_edges: Callable[[Plan, int, Peers], EdgeGroup] | None = None
        self.made: list[tuple[Plan, EdgeGroup]] = []
        self._pools: dict[str, Pool] = {}

    @property
    def next_number(self) -> int:
        """Of the plan that is made next: the same on all workers."""
        return len(self.made)

    def connect(self, plan: Plan, borrowed: Collection[tuple[str, str]] = ()) -> EdgeGroup:
        """The edges of ``plan`` at this worker, once all workers have shown the same plan.

        Args:
            plan: What all workers run.
            borrowed: By lender and borrower, which still reads during this plan what an earlier one lent (a
                backward graph, what its forward graph saved).

        Raises:
            PlanMismatch: The plans differ: ends the job with what differs.
            OutOfMemory, PeerLost, WaitTimeout, JobEnded: As `EdgeGroup`.
        """
        number = self.next_number
        for _, earlier in self.made:
            earlier.announce(number + 1)
        self.member.client.compare(f"graph {number}", plan.digest, plan.text, len(self.workers), self.timeout)
        peers = self._peers(number, plan.name)
        if self.make_edges is not None:
            group = self.make_edges(plan, number, peers)
        else:
            group = EdgeGroup(
                plan.edges, dict(plan.outbox), peers, pools=self._pool, timeout=self.timeout, borrowed=borrowed
            )
        self.made.append((plan, group))
        return group

    def _peers(self, number: int, name: str) -> Peers:
        client, me, timeout = self.member.client, self.me, self.timeout

        def publish(what: str, peer: str, value: bytes) -> None:
            client.publish(f"graph/{number}/{me}/{peer}/{what}", value, to=[peer])

        def lookup(what: str, peer: str) -> bytes:
            return client.lookup(f"graph/{number}/{peer}/{me}/{what}", timeout)

        def gone_on(peer: str, announced: int) -> PlanMismatch | None:
            return None if announced <= len(self.made) else _mismatch(peer, announced, name)

        return Peers(f"graph {name}", me, self.member.channel, publish, lookup, gone_on)

    def _pool(self, device: Device) -> Pool:
        """Where tensors of no known size lie that cross by ``device``, for all plans."""
        if device.name not in self._pools:
            self._pools[device.name] = Pool(device, limit=MOST_DYNAMIC)
        return self._pools[device.name]

    def leave(self) -> None:
        """Returns when no worker runs a graph any more; what this one has is in use until then.

        Raises `WaitTimeout` or `JobEnded`.
        """
        for _, group in self.made:
            group.announce(_OVER)
        if self.made:
            self.member.client.barrier("graphs are over", len(self.workers), self.timeout)

    def close(self) -> None:
        """Gives the memory of all plans back. Idempotent."""
        for _, group in self.made:
            group.close()


def _mismatch(worker: str, announced: int, name: str) -> PlanMismatch:
    """That ``worker`` does something else, while this worker runs graph ``name``."""
    does = "runs no graph any more" if announced >= _OVER else "plans another graph"
    return PlanMismatch(
        f"{worker} {does}, while this worker runs graph {name} once more: did they get arguments of other shapes, take "
        "another branch, or another number of steps?"
    )
