"""What a worker's ends of all stores have in common. Imports no framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tensorwire.control import Member
from tensorwire.control.settings import step_timeout
from tensorwire.device import Channel, Device, Region
from tensorwire.store.course import Course
from tensorwire.store.fates import FateLog, Produced
from tensorwire.store.sharding import StorePlan
from tensorwire.store.store_layout import StoreSpec


class _Server(Protocol):
    channel: Channel

    def close(self) -> None:
        """Lets go of the server's memory."""


class StoreEnd:
    """One worker's end of the store ``name``. All workers have to `agree` on it before."""

    servers: Sequence[_Server]  # for each shard, what it shares with the server of that

    def __init__(self, member: Member, name: str, spec: StoreSpec, plan: StorePlan) -> None:
        self.member, self.name, self.spec, self.plan = member, name, spec, plan
        self.timeout = step_timeout()  # seconds that an answer may take, as other workers have to come
        self.late = name in member.late  # the others had made it before this worker joined the job
        if member.index == member.membership.leader and not self.late:
            member.client.publish(name, spec.encoded())
        self.course = Course(member)
        self.step = 0  # rounds begun; -1: this worker has left
        self.asks = 0  # for the rule's state, that are known to have been published
        self._kept: list[Region] = []  # memory that is given back in the end
        self._log = FateLog(member.client.welcome, name, member.name)
        self.produced = self._log.counts(member.index, plan.shards)  # pushes of gradients, by shard

    @property
    def channels(self) -> list[Channel]:
        """To the server of each shard."""
        return [server.channel for server in self.servers]

    def allocate(self, device: Device, nbytes: int) -> Region:
        """Memory for as long as this worker takes part."""
        self._kept.append(device.allocate(nbytes))
        return self._kept[-1]

    def _leave(self) -> None:
        """Tells every server that this worker is done. Returns when none writes to its memory any more."""
        raise NotImplementedError

    def finish(self) -> None:
        """Tells every server that this worker is done, and gives its memory back; views of that stay as they are.

        Idempotent. Raises `WaitTimeout` or `PeerLost`, and then keeps what servers may still write to.
        """
        if self.step < 0:
            return
        if self.course.broken:
            self.step = -1
            self.course.check()  # the servers wait for the rest: the others are not to go on with what there is
        try:
            self._leave()
            for server in self.servers:
                server.close()
            for region in self._kept:
                region.close()
        finally:
            self.step = -1
        mine = (self.member.index, self.member.client.welcome.incarnation)
        self._log.add(*(Produced(self.name, s, mine[0], int(n), mine[1]) for s, n in enumerate(self.produced)))
        self._log.close()
