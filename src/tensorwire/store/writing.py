"""A process that is no part of a job pushes to one of its keys. Imports no framework."""

from __future__ import annotations

import time
from itertools import count

import msgspec
import numpy as np

from tensorwire._native import Window
from tensorwire.control import Member
from tensorwire.control.names import member_name
from tensorwire.device import Completion, RemoteRegion
from tensorwire.device.mapped import unmap
from tensorwire.edge import Producer
from tensorwire.errors import OutOfMemory, PeerLost, WaitTimeout
from tensorwire.messages import decode_message
from tensorwire.observe import counters
from tensorwire.sizes import round_up
from tensorwire.store.sharding import PAGE, StorePlan
from tensorwire.store.versions.listing import topic
from tensorwire.store.writers import DONE, Given, KeyShare, Wanted, shares

_numbers = count(1)  # of this process's writers
_LOOKS = (0.00002, 0.002)  # seconds between looks whether a push was applied: at first, and at most


class KeyWriter:
    """Pushes to ``tensor`` of the store of keys ``store``, one after another.

    ``memory``: where a push is put together, all bytes of the key; its servers' own where this process maps it.

    Raises `OutOfMemory` where a server has no room, `PeerLost`, or why the job ended.
    """

    def __init__(self, member: Member, store: str, plan: StorePlan, tensor: int, timeout: float) -> None:
        self._member, self._store, self._timeout = member, store, timeout
        nbytes = plan.tensors[tensor].nbytes
        window = Window(round_up(nbytes, PAGE), shared=True)
        self._parts: list[_Part] = []
        self._sent = self._applied = 0
        try:
            for share in shares(plan, tensor):
                self._parts.append(_Part(member, store, tensor, share, window, timeout))
        except BaseException:
            self.close()
            raise
        self._buckets = sum(len(share.buckets) for share in shares(plan, tensor))
        self.memory = memoryview(window)[:nbytes]

    def push(self) -> None:
        """Sends what lies in the memory; returns when it was applied, once.

        Called again after an error it waits for the same push, which no server applies twice. Raises `WaitTimeout`,
        `PeerLost`, or why the job ended.
        """
        if self._sent == self._applied:
            self._sent += 1
            counters.add(pushes=self._buckets)
        with self._member.explained():
            for part in self._parts:
                part.send(self._sent, self._timeout)
            for part in self._parts:
                part.wait(self._sent, self._timeout)
        self._applied = self._sent

    @property
    def under_way(self) -> bool:
        """Whether a push was sent, and it is not known to have been applied."""
        return self._sent > self._applied

    def close(self) -> None:
        """Gives the servers' memory back. A push that was sent is applied, or not. Idempotent."""
        parts, self._parts = self._parts, []
        for part in parts:
            part.close()


class _Part:
    """What goes to one server."""

    def __init__(
        self, member: Member, store: str, tensor: int, share: KeyShare, window: Window, timeout: float
    ) -> None:
        self._member, self._store, self._share = member, store, share
        self._name = member_name("server", share.server)
        self._channel = member.channel(self._name)
        device = self._channel.device
        self._wanted = msgspec.msgpack.encode(Wanted(next(_numbers), tensor, device.name))
        self._sent = 0
        self._reading: Completion | None = None
        answer = member.client.ask([self._name], topic(store, "write"), self._wanted, timeout)
        if not answer:
            member.check()
            raise PeerLost(f"{self._name} did not answer this process within {timeout:g} s")
        given = decode_message(answer[self._name], Given)
        if given.error:
            raise OutOfMemory(f"{self._name} has no room for a push: {given.error}")
        self._remote = RemoteRegion.unpack(given.region)
        self._state = device.allocate(8)
        whole, room = round_up(share.nbytes, PAGE), self._remote.view(PAGE, share.nbytes)
        mapped = self._channel.map(self._remote.view())
        self._source = None if mapped is not None else device.allocate(share.nbytes)
        if mapped is not None:
            window.place(share.start, mapped, PAGE, whole)
        elif self._source is not None:
            window.place(share.start, self._source, 0, whole)
        source = [] if self._source is None else [self._source.view()]
        self._producer = Producer(
            self._channel, self._remote.view(0, 8), slots=[room], source=source, label=f"{self._name}, a push"
        )

    def send(self, number: int, timeout: float) -> None:
        """Unless it was sent: a push that was interrupted before that is none."""
        if self._sent < number:
            self._producer.slot(number, timeout)
            self._sent = number
            self._producer.send(number)

    def wait(self, number: int, timeout: float) -> None:
        """Returns when the server has applied it."""
        end = time.monotonic() + timeout
        seconds, most = _LOOKS
        self._producer.flush(timeout)
        try:
            while self._done(end - time.monotonic()) < number:
                self._member.check()
                if time.monotonic() >= end:
                    raise WaitTimeout
                time.sleep(seconds)
                seconds = min(1.5 * seconds, most)
        except WaitTimeout:
            raise WaitTimeout(
                f"{self._name} has not applied a push within {timeout:g} s; it still may: wait again by fsync"
            ) from None

    def _done(self, seconds: float) -> int:
        """The number of the last push that the server has applied."""
        if self._reading is None:  # else it is on its way since an earlier call
            self._reading = self._channel.read(self._state.view(), self._remote.view(DONE, 8))
        self._reading.wait(max(0.0, seconds))
        self._reading = None
        return int(np.frombuffer(memoryview(self._state), np.uint64)[0])

    def close(self) -> None:
        self._member.client.tell(self._name, topic(self._store, "written"), self._wanted)
        unmap(self._channel, self._remote)
        self._state.close()
        if self._source is not None:
            self._source.close()
