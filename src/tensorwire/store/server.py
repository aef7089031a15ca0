"""What a server does with one shard of a store: its memory, and the mode that says when it closes a round."""

from __future__ import annotations

from tensorwire.control import Member
from tensorwire.store.lockstep import Lockstep
from tensorwire.store.modes import Sync
from tensorwire.store.own_clocks import OwnClocks
from tensorwire.store.server_state import AtRest, Stateful, WithValues
from tensorwire.store.shard import Shard
from tensorwire.store.store_layout import StoreSpec


class StoreServer:
    """Serves the ``shard``-th shard of the store ``name`` to all workers until they finish."""

    def __init__(self, member: Member, name: str, spec: StoreSpec, servers: int, shard: int) -> None:
        self.shard = Shard(member, name, spec, servers, shard)
        self.rule: Stateful = self.shard.rule
        self._rounds: Lockstep | OwnClocks
        self.at_rest: AtRest | None = None
        if isinstance(spec.mode, Sync):  # a bucket changes when every worker has pushed it: one that asks has not
            self._rounds = Lockstep(self.shard)
        else:
            self.rule = WithValues(self.rule, self.shard.plan, self.shard.index, memoryview(self.shard.parameters))
            self._rounds = clocks = OwnClocks(self.shard)
            together = self.shard.rule.together
            self.at_rest = lambda bucket: clocks.at_rest(None if together else bucket)

    def incarnation(self, rank: int) -> int | None:
        """That of the worker of a rank with which this shard shares memory, if there is one."""
        worker = self.shard.workers.get(rank)
        return None if worker is None else worker.incarnation

    def admit(self, rank: int, incarnation: int) -> None:
        """Lets a worker join, in a thread for that. Raises what ends the job."""
        self._rounds.admit(rank, incarnation)

    def run(self) -> None:
        """Round after round, until every worker has finished."""
        self._rounds.run()

    def close(self) -> None:
        """Frees the store's memory."""
        self.shard.close()
