"""What a worker's ends of keys and of rows have in common. Imports no framework."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tensorwire.control import Member
from tensorwire.control.settings import step_timeout
from tensorwire.device import Channel, Device, Region
from tensorwire.errors import WaitTimeout
from tensorwire.store.course import Course, last_request_waited
from tensorwire.store.fates import FateLog, Produced
from tensorwire.store.modes import awaited
from tensorwire.store.requests import Operation, RequestLink, StoreRequests, links_of
from tensorwire.store.sharding import StorePlan
from tensorwire.store.store_layout import StoreSpec


class RequestClient:
    """One worker's end of a store ``name`` that it sends requests to. All workers have to `agree` on it before."""

    servers: Sequence[StoreRequests]  # what it shares with each

    def __init__(self, member: Member, name: str, spec: StoreSpec, plan: StorePlan) -> None:
        self.member, self.name, self.spec, self.plan = member, name, spec, plan
        self.timeout = step_timeout()  # seconds that an answer may take, as other workers have to come
        if member.index == 0:
            member.client.publish(name, spec.encoded())
        self.course = Course(member)
        self.step = 0  # times that state was loaded; -1: this worker has left
        self.asks = 0  # for the rule's state, that are known to have been published
        self.links: list[RequestLink] = links_of(member, plan.servers)
        self.produced = [0] * plan.servers  # pushes, by server
        self._kept: list[Region] = []  # memory that is given back in the end
        self._log = FateLog(member.client.welcome, name, member.name)

    @property
    def channels(self) -> list[Channel]:
        """To each server."""
        return [link.channel for link in self.links]

    def allocate(self, device: Device, nbytes: int) -> Region:
        """Memory for as long as this worker takes part."""
        self._kept.append(device.allocate(nbytes))
        return self._kept[-1]

    def announce(self, operation: Operation, options: bytes) -> list[int]:
        """A request to every server that is about the whole store. Returns the number that it has on each."""
        with self.course.unit("a request"):
            return [server.announce(operation, options) for server in self.servers]

    def place(self) -> tuple[str, str]:
        """Where this worker waits, and, unless that is for all others, for whom."""
        return self.name, awaited(self.spec.mode, self.member.client.welcome.workers)

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
            for server in self.servers:
                server.announce(Operation.FINISH, bytes(8 * len(self.spec.numeric)))
            for server in self.servers:
                server.wait_until_finished(self.timeout)
            for server in self.servers:
                server.close()
            for region in self._kept:
                region.close()
        except WaitTimeout:
            raise last_request_waited(self.name, self.timeout) from None
        finally:
            self.step = -1
        self._log.add(*(Produced(self.name, s, self.member.index, pushes) for s, pushes in enumerate(self.produced)))
        self._log.close()


def pack_options(values: Sequence[float]) -> bytes:
    """The option block of a request."""
    return struct.pack(f"<{len(values)}d", *values)
