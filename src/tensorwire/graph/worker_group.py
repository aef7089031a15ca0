"""The workers of a job as its graphs see them: they make the same plans, in the same order, or the job ends."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tensorwire.control import Member
from tensorwire.device import Device
from tensorwire.edge import Pool
from tensorwire.graph.inflow import OVER
from tensorwire.graph.ir import worker_name
from tensorwire.graph.plan import Plan
from tensorwire.graph.wires import Wires, make_pool


class WorkerGroup:
    """All workers of a job, called ``worker 0``, ``worker 1`` and so on. ``timeout``: seconds that one may wait for the
    others.

    ``make_wires``: what makes the wires of a plan, called as `Wires`; a benchmark puts others in its place.
    """

    def __init__(self, member: Member, workers: int, timeout: float) -> None:
        self.member, self.timeout = member, timeout
        self.workers = tuple(map(worker_name, range(workers)))
        self.me = worker_name(member.index)
        self.make_wires: Callable[..., Wires] = Wires
        self._wires: list[Wires] = []
        self._pools: dict[str, Pool] = {}

    @property
    def next_number(self) -> int:
        """Of the plan that is made next: the same on all workers."""
        return len(self._wires)

    def connect(self, plan: Plan, borrowed: Collection[tuple[str, str]] = ()) -> Wires:
        """The wires of ``plan`` at this worker, once all workers have shown the same plan; ``borrowed`` as for `Wires`.

        Raises `PlanMismatch`, which ends the job with what differs, or what `Wires` raises.
        """
        number = self.next_number
        for earlier in self._wires:
            earlier.plan_another(number + 1)
        self.member.client.compare(f"graph {number}", plan.digest, plan.text, len(self.workers), self.timeout)
        wires = self.make_wires(
            plan, self.me, self.member, number, self.timeout, borrowed, self._wires.__len__, self._pool
        )
        self._wires.append(wires)
        return wires

    def _pool(self, device: Device) -> Pool:
        """The one of ``device``, for all plans."""
        if device.name not in self._pools:
            self._pools[device.name] = make_pool(device)
        return self._pools[device.name]

    def leave(self) -> None:
        """Returns when no worker runs a graph any more; what this one has is in use until then.

        Raises `WaitTimeout` or `JobEnded`.
        """
        for wires in self._wires:
            wires.plan_another(OVER)
        if self._wires:
            self.member.client.barrier("graphs are over", len(self.workers), self.timeout)

    def close(self) -> None:
        """Gives the memory of all plans back. Idempotent."""
        for wires in self._wires:
            wires.close()
