"""What a worker's ends of keys and of rows have in common. Imports no framework."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tensorwire.control import Member
from tensorwire.errors import WaitTimeout
from tensorwire.store.course import last_request_waited
from tensorwire.store.modes import awaited
from tensorwire.store.request_link import RequestLink, RequestOperation, StoreRequests, links_of
from tensorwire.store.sharding import StorePlan
from tensorwire.store.store_end import StoreEnd
from tensorwire.store.store_layout import StoreSpec


class RequestClient(StoreEnd):
    """One worker's end of a store ``name`` that it sends requests to."""

    servers: Sequence[StoreRequests]

    def __init__(self, member: Member, name: str, spec: StoreSpec, plan: StorePlan) -> None:
        super().__init__(member, name, spec, plan)
        self.links: list[RequestLink] = links_of(member, plan.servers)

    def announce(self, operation: RequestOperation, options: bytes) -> list[int]:
        """A request to every server that is about the whole store. Returns the number that it has on each."""
        with self.course.unit("a request"):
            return [server.announce(operation, options) for server in self.servers]

    def place(self) -> tuple[str, str]:
        """Where this worker waits, and, unless that is for all others, for whom."""
        return self.name, awaited(self.spec.mode, self.member.client.welcome.workers)

    def _leave(self) -> None:
        try:
            for server in self.servers:
                server.announce(RequestOperation.FINISH, bytes(8 * len(self.spec.numeric)))
            for server in self.servers:
                server.wait_until_finished(self.timeout)
        except WaitTimeout:
            raise last_request_waited(self.name, self.timeout) from None


def pack_options(values: Sequence[float]) -> bytes:
    """The option block of a request."""
    return struct.pack(f"<{len(values)}d", *values)
