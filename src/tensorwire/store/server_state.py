"""Saving and loading optimizer state, on the server's side; `client_state` is the workers' side."""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from tensorwire.control import Member
from tensorwire.control.names import member_name
from tensorwire.control.settings import step_timeout
from tensorwire.errors import JobEnded, PeerLost, RemoteAccessError, TensorwireError, WaitTimeout
from tensorwire.messages import decode_message
from tensorwire.store.sharding import Bucket, StorePlan
from tensorwire.store.state_transfer import VALUE, Ask, Entry, Item, StateReceiver, StateSender, ask_key, load_key

AtRest = Callable[[int | None], AbstractContextManager[object]]  # of one part of the state, or of all
_LOOKUP_SECONDS = 3600.0  # one request an hour while nobody asks


class Stateful(Protocol):
    """A rule, as this module uses it."""

    def state(self) -> Iterator[Iterable[Item]]:
        """All that is kept beside the parameters, to be saved: a part for each bucket, or for some rows."""

    def load_state(self, items: Iterable[Item]) -> None:
        """Replaces it. Raises `ProtocolError`."""


class WithValues:
    """A rule whose parameters are saved with its state: for modes in which workers have others."""

    def __init__(self, rule: Stateful, plan: StorePlan, shard: int, parameters: memoryview) -> None:
        self._rule, self._plan, self._shard, self._parameters = rule, plan, shard, parameters
        self.load_state = rule.load_state

    def state(self) -> Iterator[Iterable[Item]]:
        """The parameters, and what the rule keeps beside them."""
        values = map(self._values, self._plan.buckets[self._shard])
        for parts in itertools.zip_longest(values, self._rule.state(), fillvalue=()):
            yield itertools.chain(*parts)

    def _values(self, bucket: Bucket) -> Iterator[Item]:
        for piece in bucket.pieces:
            spec = self._plan.tensors[piece.tensor]
            entry = Entry(piece.tensor, "", spec.dtype, spec.shape, True, piece.start, piece.stop, VALUE)
            start = bucket.shard + piece.offset
            yield entry, self._parameters[start : start + entry.nbytes]


def moments(rule: Stateful, at_rest: AtRest | None) -> Iterator[Item]:
    """All state. Each part is copied while it is at rest, so that no push waits for whoever takes the copy.

    Without ``at_rest``, nothing changes while somebody asks.
    """
    parts = rule.state()
    if at_rest is None:
        yield from itertools.chain.from_iterable(parts)
        return
    for number in itertools.count():
        with at_rest(number):
            part = next(parts, None)
            copies = [(entry, memoryview(bytes(data))) for entry, data in part or ()]
        if part is None:
            return
        yield from copies


class Asks:
    """Gives every worker that asks the state of a ``shard`` of ``store``, until `close` or the job's end.

    No thread waits for an ask: one begins with it, and ends when it is answered. ``at_rest`` is as for `moments`.
    """

    def __init__(self, member: Member, store: str, shard: int, rule: Stateful, at_rest: AtRest | None) -> None:
        self._member, self._store, self._shard, self._rule, self._at_rest = member, store, shard, rule, at_rest
        self._number, self._closed = 0, False
        self._answering: threading.Thread | None = None
        self._wait()

    def _wait(self) -> None:
        with contextlib.suppress(JobEnded):
            self._member.client.lookup_later(ask_key(self._store, self._number), _LOOKUP_SECONDS, self._come)

    def _come(self, found: bytes | TensorwireError) -> None:
        if self._closed or isinstance(found, JobEnded):
            return
        if isinstance(found, WaitTimeout):
            self._wait()
        elif isinstance(found, TensorwireError):
            self._member.fail(f"cannot give its state: {found}")
        else:
            name = f"{self._store} answer"
            self._answering = threading.Thread(target=self._answer, args=(found,), name=name, daemon=True)
            self._answering.start()

    def _answer(self, found: bytes) -> None:
        member = self._member
        try:
            ask = decode_message(found, Ask)
            channel = member.channel(member_name("worker", ask.worker))
            endpoint = ask.endpoints[self._shard]
            # An error: that worker has given up, and knows why.
            with contextlib.suppress(RemoteAccessError, WaitTimeout), StateSender(channel, endpoint) as sender:
                sender.send(moments(self._rule, self._at_rest))
            self._number += 1
            self._wait()
        except (JobEnded, PeerLost):
            return  # the job's end has a cause of its own
        except Exception as error:
            member.fail(f"cannot give its state: {type(error).__name__}: {error}", traceback.format_exc())

    def close(self) -> None:
        """Nobody asks any more. Returns when the last has its answer, or has given up."""
        self._closed = True
        if self._answering is not None:
            self._answering.join()


def take_state(member: Member, store: str, shard: int, step: int, rule: Stateful, worker: int = 0) -> None:
    """The side of a server's shard of the round ``step``, in which ``worker`` loads the state of ``store``."""
    name = member_name("worker", worker)
    with StateReceiver(member.channel(name)) as receiver:
        member.client.publish(load_key(store, step, member.name, shard), receiver.endpoint, to=[name])
        rule.load_state(receiver.receive(step_timeout()))
