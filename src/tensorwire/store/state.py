"""Saving and loading what optimizers keep on the servers. None of it runs in a step.

Saving: a worker *asks*. It numbers its ask by who publishes that number first, and every server answers the asks in
their order, from a thread of its own. This is safe between two steps of the worker that asks: a server changes a
bucket only when every worker has pushed its gradient, and this one is here.

Loading: a round of its kind. The servers take what worker 0 sends, and publish the versions of that round.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from tensorwire.errors import JobEnded, PeerLost, ProtocolError, RemoteAccessError, WaitTimeout
from tensorwire.store.client import StoreClient, step_timeout
from tensorwire.store.rounds import Operation
from tensorwire.store.stream import Item, Receiver, Sender

if TYPE_CHECKING:
    from tensorwire.store.server import StoreServer

_LOOKUP_SECONDS = 3600.0  # one request an hour while nobody asks


class Ask(msgspec.Struct, frozen=True):
    """Worker ``worker`` wants the state. ``doors[s]`` opens a slot for server ``s``."""

    worker: int
    doors: list[bytes]


# ---- saving


def fetch_state(client: StoreClient) -> Iterator[Item]:
    """What the servers keep for the optimizer, server after server; each memory is valid until the next is asked for.

    Any worker may call it between two of its steps. Raises `WaitTimeout`, `PeerLost` or `JobEnded`.
    """
    if client.step < 0:
        raise JobEnded(f"this worker has left the job, and {client.name} is on its servers: save before job.close()")
    receivers: list[Receiver] = []
    try:
        for channel in client.channels:
            receivers.append(Receiver(channel))
        _publish(client, Ask(client.member.index, [r.door for r in receivers]))
        for receiver in receivers:
            yield from receiver.receive(step_timeout())
    finally:
        for receiver in receivers:
            receiver.close()


def _publish(client: StoreClient, ask: Ask) -> None:
    """As the first ask whose number nobody has taken."""
    servers = [f"server {s}" for s in range(client.plan.servers)]
    encoded = msgspec.msgpack.encode(ask)
    while True:
        key = _ask_key(client.name, client.asks)
        client.asks += 1
        try:
            client.member.client.publish(key, encoded, to=servers)
            return
        except ProtocolError as error:
            if "published before" not in str(error):
                raise


def _ask_key(store: str, number: int) -> str:
    return f"{store}/ask/{number}"


def answer_asks(server: StoreServer) -> None:
    """Gives every worker that asks this server's part of the state, until the job ends."""
    try:
        for number in itertools.count():
            ask = _next_ask(server, number)
            try:
                channel = server.member.channel("worker", ask.worker)
                with Sender(channel, ask.doors[server.index]) as sender:
                    sender.send(server.rule.state())
            except (RemoteAccessError, WaitTimeout):
                continue  # that worker has given up, and knows why
    except (JobEnded, PeerLost):
        return  # the job's end has a cause of its own
    except Exception as error:
        server.member.fail(f"cannot give its state: {type(error).__name__}: {error}", traceback.format_exc())


def _next_ask(server: StoreServer, number: int) -> Ask:
    while True:
        try:
            found = server.member.client.lookup(_ask_key(server.name, number), _LOOKUP_SECONDS)
            return msgspec.msgpack.decode(found, type=Ask)
        except WaitTimeout:
            continue


# ---- loading


def load_state(client: StoreClient, options: Sequence[float], items: Callable[[int], Iterable[Item]]) -> None:
    """A round in which the state of all optimizers becomes ``items(server)`` for each server; worker 0's count.

    Every worker calls it in the same round. Raises `WaitTimeout`, `PeerLost` or `JobEnded`.
    """
    client.begin(Operation.LOAD, options)
    if client.member.index == 0:
        for index, channel in enumerate(client.channels):
            with Sender(channel, _door(client, index)) as sender:
                sender.send(items(index))
    client.wait()


def _door(client: StoreClient, server: int) -> bytes:
    try:
        return client.member.client.lookup(_load_key(client.name, client.step, server), step_timeout())
    except WaitTimeout:
        raise WaitTimeout(
            f"server {server} did not begin to load the state of {client.name} within {step_timeout():g} s: "
            "another worker has not come to it (TENSORWIRE_TIMEOUT sets the limit)"
        ) from None


def _load_key(store: str, step: int, server: int) -> str:
    return f"{store}/load/{step}/server {server}"


def take_state(server: StoreServer) -> None:
    """The server's side of a round that loads."""
    with Receiver(server.member.channel("worker", 0)) as receiver:
        key = _load_key(server.name, server.step, server.index)
        server.member.client.publish(key, receiver.door, to=["worker 0"])
        server.rule.load_state(receiver.receive(step_timeout()))
