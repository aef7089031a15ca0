"""The hosts of a job as its graphs see them: they make the same plans, in the same order, or the job ends."""

from __future__ import annotations

from collections.abc import Collection

from tensorwire.control import Member
from tensorwire.graph.plan import Plan
from tensorwire.graph.rpc import Calls, RpcWires
from tensorwire.graph.wires import Wires


class Party:
    """All workers of a job: host ``worker:3`` is worker 3. ``timeout``: seconds that one may wait for the others."""

    def __init__(self, member: Member, workers: int, timeout: float) -> None:
        self.member, self.timeout = member, timeout
        self.hosts = tuple(f"worker:{rank}" for rank in range(workers))
        self.me = f"worker:{member.index}"
        self._wires: list[Wires | RpcWires] = []
        self._calls: Calls | None = None

    @property
    def next_number(self) -> int:
        """Of the plan that is made next: the same on all hosts."""
        return len(self._wires)

    def connect(self, plan: Plan, borrowed: Collection[tuple[str, str]] = (), *, rpc: bool = False) -> Wires | RpcWires:
        """The wires of ``plan`` at this host, once all hosts have shown the same plan; ``borrowed`` as for `Wires`.

        ``rpc``: over calls of gRPC, to compare with.

        Raises `PlanMismatch`, which ends the job with what differs, or what `Wires` raises.
        """
        number = self.next_number
        for earlier in self._wires:
            earlier.plan_another(number + 1)
        self.member.client.compare(f"graph {number}", plan.digest, plan.text, len(self.hosts), self.timeout)
        wires: Wires | RpcWires
        if rpc:
            self._calls = self._calls or Calls(self.member)
            wires = RpcWires(plan, self.me, self._calls, number, self.timeout)
        else:
            wires = Wires(plan, self.me, self.member, number, self.timeout, borrowed, self._wires.__len__)
        self._wires.append(wires)
        return wires

    def close(self) -> None:
        """Gives the memory of all plans back. Idempotent."""
        for wires in self._wires:
            wires.close()
        if self._calls is not None:
            self._calls.close()
