"""A worker's side of versions for readers of stores of keys and of rows. Imports no framework."""

from __future__ import annotations

from tensorwire.control import Member
from tensorwire.edge import Word
from tensorwire.store.endpoints import show
from tensorwire.store.request_client import RequestClient
from tensorwire.store.request_link import WORD, RequestOperation, StoreRequests
from tensorwire.store.sharding import StorePlan
from tensorwire.store.store_layout import StoreSpec
from tensorwire.store.versions.cuts import Cut, await_grant


class PublishedClient(RequestClient):
    """One worker's end of what makes versions, ``name``. All workers have to `agree` on it before."""

    def __init__(self, member: Member, name: str, spec: StoreSpec, plan: StorePlan) -> None:
        super().__init__(member, name, spec, plan)
        self.servers: list[_Server] = [_Server(self, server) for server in range(plan.servers)]
        self._published = 0

    @property
    def asked(self) -> int:
        """How often readers have asked for a version."""
        return self.servers[0].asked.value

    def cut(self, run: int, step: int, *, wait: bool) -> int | None:
        """Worker 0: what the stores have, with all it has pushed, becomes a version. As `StoreClient.cut`."""
        counter, publisher = self._published + 1, self.servers[0]
        buffer = await_grant(
            publisher.grant, counter, lambda call: self.member.wait(call, self.timeout, self.place), patient=wait
        )
        if buffer is None:
            return None
        with self.course.unit(f"version {counter} of {self.name}"):
            self.announce(RequestOperation.CUT, Cut(counter, buffer, 0, run, step).pack())
            self._published = counter
        return counter


class _Server(StoreRequests):
    """What this worker shares with one server: two words here, which server 0 raises for worker 0."""

    def __init__(self, client: PublishedClient, index: int) -> None:
        super().__init__(client.member, client.name, client.links[index], 0, client.timeout)
        words = client.allocate(self.channel.device, 2 * WORD)
        self.grant, self.asked = Word(words, 0, self.channel), Word(words, WORD, self.channel)
        show(client.member, client.name, self.name, words)
