"""Saving and loading the servers' optimizer state, on the worker's side. None of it runs in a step.

To save, a worker numbers its request by publishing that number first. Every server answers requests in their order,
from a thread of its own. This is safe between two steps of the requesting worker: a server changes a bucket only when
every worker has pushed its gradient.

Loading is a round of its own kind: the servers take worker 0's state, and publish the versions of that round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from tensorwire.control import Member
from tensorwire.control.names import member_name
from tensorwire.device import Channel
from tensorwire.errors import AlreadyPublished, JobEnded, Unsupported, WaitTimeout
from tensorwire.store.sharding import StorePlan
from tensorwire.store.state_transfer import KINDS, Ask, Item, StateReceiver, StateSender, ask_key, load_key
from tensorwire.store.step_header import StepOperation
from tensorwire.store.store_client import StoreClient

# ---- saving


class StateClient(Protocol):
    """A worker's end of a store, as saving uses it."""

    member: Member
    name: str
    plan: StorePlan
    step: int  # -1: the worker has left
    asks: int
    timeout: float

    @property
    def channels(self) -> list[Channel]:
        """To the server of each shard."""


def fetch_state(client: StateClient) -> Iterator[Item]:
    """What the servers keep for the optimizer, shard after shard; each memory is valid until the next is asked for.

    Any worker may call it between two of its steps. Raises `Unsupported` for what is no number and no array,
    `WaitTimeout`, `PeerLost` or `JobEnded`.
    """
    if client.step < 0:
        raise JobEnded(f"this worker has left the job, and {client.name} is on its servers: save before job.close()")
    receivers: list[StateReceiver] = []
    try:
        for channel in client.channels:
            receivers.append(StateReceiver(channel))
        _publish(client, Ask(client.member.index, [r.endpoint for r in receivers]))
        for receiver in receivers:
            for entry, data in receiver.receive(client.timeout):
                if entry.kind not in KINDS:
                    name = client.plan.tensors[entry.tensor].name
                    raise Unsupported(
                        f"the rule keeps {entry.key!r} of {name!r} as a {entry.kind}, which is neither a number nor an "
                        "array of a dtype that servers save"
                    )
                yield entry, data
    finally:
        for receiver in receivers:
            receiver.close()


def _publish(client: StateClient, ask: Ask) -> None:
    """As the first ask whose number nobody has taken."""
    servers = [member_name("server", s) for s in range(client.plan.servers)]
    encoded = msgspec.msgpack.encode(ask)
    while True:
        key = ask_key(client.name, client.asks)
        client.asks += 1
        try:
            client.member.client.publish(key, encoded, to=servers)
            return
        except AlreadyPublished:
            continue


# ---- loading


def load_state(client: StoreClient, options: Sequence[float], items: Callable[[int], Iterable[Item]]) -> None:
    """A round in which the state of all optimizers becomes ``items(shard)`` for each shard; worker 0's count.

    Every worker calls it in the same round. Raises `WaitTimeout`, `PeerLost` or `JobEnded`.
    """
    client.begin(StepOperation.LOAD, options)
    if client.member.index == 0:
        send_state(client, [client.step] * len(client.channels), items)
    client.wait()


def send_state(client: StateClient, numbers: Sequence[int], items: Callable[[int], Iterable[Item]]) -> None:
    """Worker 0: ``items(shard)`` to each shard, which loads it in its round or request of that number.

    Raises `WaitTimeout`, `PeerLost` or `JobEnded`.
    """
    for shard, (number, channel) in enumerate(zip(numbers, client.channels, strict=True)):
        server = member_name("server", client.plan.server_of(shard))
        try:
            endpoint = client.member.client.lookup(load_key(client.name, number, server, shard), client.timeout)
        except WaitTimeout:
            raise WaitTimeout(
                f"{server} did not begin to load the state of {client.name} within {client.timeout:g} s: "
                "another worker has not reached it (TENSORWIRE_TIMEOUT sets the limit)"
            ) from None
        with StateSender(channel, endpoint) as sender:
            sender.send(items(shard))
