"""A worker's side of a store of keys: requests to its servers, and the memory that values come from and go to.

Imports no framework. Several threads may use it if they take turns.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
import numpy as np

from tensorwire._native import Window, copy_is_large, gather
from tensorwire.control import Member
from tensorwire.control.names import member_name
from tensorwire.control.settings import step_timeout
from tensorwire.device import Channel, Completion, Device, Region, RemoteRegion
from tensorwire.device.mapped import unmap
from tensorwire.edge import Producer, Word
from tensorwire.edge.words import wait_unless
from tensorwire.errors import JobEnded, ProtocolError, WaitTimeout
from tensorwire.observe import counters
from tensorwire.store.bucket_code import encoders
from tensorwire.store.course import Course, last_request_waited
from tensorwire.store.fates import FateLog, Produced
from tensorwire.store.key_layout import (
    DEPTH,
    MOST_BUCKETS,
    PUSHES,
    REQUEST_BYTES,
    KeyOperation,
    answer_word,
    key_inbox,
    pack_request,
    values_at,
    words_at,
)
from tensorwire.store.modes import Sync, awaited
from tensorwire.store.send_window import SendWindow
from tensorwire.store.sharding import Bucket, StorePlan
from tensorwire.store.store_layout import ServerEndpoint, StoreSpec, WorkerEndpoint

_CARRYING = (*PUSHES, KeyOperation.ASSIGN)
_WANTING = (KeyOperation.PULL, KeyOperation.PUSHPULL)


class KeyClient:
    """One worker's end of the store of keys ``name``. All workers have to `agree` on it before."""

    def __init__(self, member: Member, name: str, spec: StoreSpec, plan: StorePlan) -> None:
        self.member, self.name, self.spec, self.plan = member, name, spec, plan
        self.timeout = step_timeout()  # seconds that an answer may take, as other workers have to come
        if member.index == 0:
            member.client.publish(name, spec.encoded())
        self.course = Course(member)
        self.step = 0  # times that state was loaded; -1: this worker has left
        self.asks = 0  # for the rule's state, that are known to have been published
        self._sources: dict[str, Region] = {}  # by device: what is pushed leaves from, laid out as the space
        self._copies: dict[str, Region] = {}  # by device: where answers and values come to
        self._links = [_Link(self, s) for s in range(plan.servers)]
        self.buckets: list[list[Bucket]] = [[] for _ in plan.tensors]  # of each tensor, in the order of its elements
        for bucket in plan.in_order():
            if bucket.nbytes:
                self.buckets[bucket.pieces[0].tensor].append(bucket)
        for mine in self.buckets:
            mine.sort(key=lambda b: b.first)
        self._slots = memoryview(self._place_slots())
        # What is filled: the slots, or where pushes are coded memory of our own, laid out like them.
        self._filled = np.zeros(plan.space_bytes, np.uint8).data if spec.compression else self._slots
        self._encoders = encoders(spec, plan, self._filled)  # by bucket number
        self._values = memoryview(self._place_values())
        count = sum(map(len, plan.buckets))
        self.asked = [0] * count  # by the bucket's number: answers that were asked for
        self.pushed = [0] * count  # and, where rounds are those of all workers, the answer to the last push
        self._together = isinstance(spec.mode, Sync)
        self._produced = [0] * plan.servers
        self._log = FateLog(member.client.welcome, name, member.name)
        for link in self._links:
            link.open()

    def source_on(self, device: Device) -> Region:
        """That device's memory that pushes leave from, where servers' memory cannot be mapped."""
        if device.name not in self._sources:
            self._sources[device.name] = device.allocate(self.plan.space_bytes)
        return self._sources[device.name]

    def copies_on(self, device: Device) -> Region:
        """That device's memory that answers and values come to: one file, not one for each server."""
        if device.name not in self._copies:
            self._copies[device.name] = device.allocate(values_at(self.plan) + self.plan.space_bytes)
        return self._copies[device.name]

    def _place_slots(self) -> Window:
        window = Window(self.plan.space_bytes, shared=True)
        for index, at, shard, nbytes in self.plan.runs():
            link = self._links[index]
            if link.mapped is not None:
                window.place(at, link.mapped, link.layout.slots + shard, nbytes)
            else:
                window.place(at, self.source_on(link.channel.device), at, nbytes)
        return window

    def _place_values(self) -> Window:
        window = Window(self.plan.space_bytes, shared=True)
        for index, at, _, nbytes in self.plan.runs():
            window.place(at, self._copies[self._links[index].channel.device.name], values_at(self.plan) + at, nbytes)
        return window

    @property
    def channels(self) -> list[Channel]:
        """To each server."""
        return [link.channel for link in self._links]

    # ---- memory

    def slot(self, tensor: int) -> memoryview:
        """Where the elements of a tensor are to be before they are pushed; see `wait_for_slot`."""
        at = self.plan.offsets[tensor]
        return self._filled[at : at + self.plan.tensors[tensor].nbytes]

    def value(self, tensor: int) -> memoryview:
        """What the last answered pull of a tensor brought."""
        at = self.plan.offsets[tensor]
        return self._values[at : at + self.plan.tensors[tensor].nbytes]

    def wait_for_slot(self, tensor: int) -> None:
        """Returns when the servers have taken what was pushed last. Raises as `wait_for`."""
        for bucket in self.buckets[tensor]:
            self.wait_for_push(bucket)

    def wait_for_push(self, bucket: Bucket, timeout: float | None = None) -> None:
        """Returns when the last push of a bucket has been applied. Raises as `wait_for`."""
        if self._together:
            self.wait_for(bucket, self.pushed[bucket.number], timeout)
        else:
            link = self._links[bucket.server]
            self._wait(link, partial(link.wait_for_request, bucket.index), timeout)

    def push_is_applied(self, bucket: Bucket) -> bool:
        """Whether the last push of a bucket has been applied."""
        link = self._links[bucket.server]
        if self._together:
            return link.word(bucket.index).value >= self.pushed[bucket.number]
        return link.has_looked(bucket.index)

    def fill(self, tensor: int, values: object) -> None:
        """Copies an array on the CPU, of the tensor's size and dtype, into its slot."""
        room = self.slot(tensor)
        gather(room, values, copy_is_large(room.nbytes))
        counters.add(copies=1, copied_bytes=room.nbytes)

    def forget(self) -> None:
        """Values were set: nothing is left to be added to the next pushes."""
        for encoder in self._encoders.values():
            encoder.reset(self._slots)

    def _encode(self, operation: KeyOperation, bucket: Bucket) -> int:
        """Brings what was filled into the slot of a bucket, where it is not there. Returns how many bytes travel."""
        if not self.spec.compression:
            return bucket.nbytes
        filled, slot = (memory[bucket.space : bucket.space + bucket.nbytes] for memory in (self._filled, self._slots))
        encoder = self._encoders.get(bucket.number) if operation in PUSHES else None
        nbytes = bucket.nbytes if encoder is None else encoder.nbytes
        if encoder is None:
            slot[:] = filled
        else:
            encoder.encode(b"\1", slot, slot)
        counters.add(copies=1, copied_bytes=nbytes)
        return nbytes

    # ---- requests

    def request(self, operation: KeyOperation, tensors: Iterable[int], options: bytes, urgency: int = 0) -> None:
        """Asks the servers of ``tensors`` for it. What is to be pushed lies in the slots.

        Smaller ``urgency`` first, where requests have to wait for those before them.

        Raises `PeerLost`, `WaitTimeout` where servers take no more requests, or `JobEnded` after `finish`.
        """
        if self.step < 0:
            raise JobEnded("this worker has left the job")
        waiting: list[list[Bucket]] = [[] for _ in self._links]
        nbytes = [0] * len(self._links)
        carrying = operation in _CARRYING
        for tensor in tensors:
            for bucket in self.buckets[tensor]:
                server = bucket.server
                mine = waiting[server]
                if len(mine) == MOST_BUCKETS or (carrying and mine and nbytes[server] + bucket.nbytes > REQUEST_BYTES):
                    self._send(server, operation, mine, options, urgency)
                    mine = waiting[server] = []
                    nbytes[server] = 0
                mine.append(bucket)
                nbytes[server] += bucket.nbytes
        for server, mine in enumerate(waiting):
            if mine:
                self._send(server, operation, mine, options, urgency)

    def _send(self, server: int, operation: KeyOperation, buckets: list[Bucket], options: bytes, urgency: int) -> None:
        carrying = operation in _CARRYING
        sizes = [self._encode(operation, bucket) for bucket in buckets] if carrying else []
        if operation in PUSHES:
            self._produced[server] += len(buckets)
            counters.add(pushes=len(buckets))
        self._links[server].send(operation, buckets, options, urgency, sizes)
        if not self._together and operation not in _WANTING:
            return
        for bucket in buckets:
            self.asked[bucket.number] += 1
            if carrying:
                self.pushed[bucket.number] = self.asked[bucket.number]

    def announce(self, operation: KeyOperation, options: bytes) -> list[int]:
        """A request to every server that names no bucket. Returns the number that it has on each."""
        return [link.announce(operation, options) for link in self._links]

    # ---- answers

    def answered(self, tensor: int, asked: Sequence[int]) -> bool:
        """Whether the servers have given so many answers about each bucket of a tensor."""
        return all(
            self._links[b.server].word(b.index).value >= number
            for b, number in zip(self.buckets[tensor], asked, strict=True)
        )

    def wait_for(self, bucket: Bucket, number: int, timeout: float | None = None) -> None:
        """Returns when there have been so many answers about a bucket. Raises `PeerLost` or `WaitTimeout`."""
        if number:
            link = self._links[bucket.server]
            self._wait(link, partial(link.word(bucket.index).wait, number), timeout)

    def _wait(self, link: _Link, wait: Callable[[float], object], timeout: float | None) -> None:
        """``wait(seconds)``, unless a request could not be sent."""

        def failure() -> BaseException | None:
            error = link.failure
            if error is not None:
                self.course.begin(f"a request of keys to {link.name}")
                self.course.note(error)
            return error

        seconds = self.timeout if timeout is None else timeout
        self.member.wait(partial(wait_unless, wait, gone_on=failure), seconds, self._place)

    def _place(self) -> tuple[str, str]:
        return self.name, awaited(self.spec.mode, self.member.client.welcome.workers)

    def count_unsent(self, tensor: int, pushes: int) -> None:
        """This worker's total has pushes of a tensor that were asked for and will not leave, too."""
        for bucket in self.buckets[tensor]:
            self._produced[bucket.server] += pushes

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
            numbers = self.announce(KeyOperation.FINISH, bytes(8 * len(self.spec.numeric)))
            for link, number in zip(self._links, numbers, strict=True):
                link.wait_until_looked(number, self.timeout)
            for link in self._links:
                link.close()
            for region in (*self._sources.values(), *self._copies.values()):
                region.close()
        except WaitTimeout:
            raise last_request_waited(self.name, self.timeout) from None
        finally:
            self.step = -1
        self._log.add(*(Produced(self.name, s, self.member.index, pushes) for s, pushes in enumerate(self._produced)))
        self._log.close()


class _Link:
    """What this worker shares with one server."""

    def __init__(self, client: KeyClient, index: int) -> None:
        plan, member = client.plan, client.member
        self._client: KeyClient = weakref.proxy(client)  # which has this
        self.name = member_name("server", index)
        self.channel: Channel = member.channel(self.name)
        key = f"{client.name}/{self.name}/{member.name}"
        endpoint = msgspec.msgpack.decode(member.client.lookup(key, timeout=600.0), type=ServerEndpoint)
        self._inbox = RemoteRegion.unpack(endpoint.inbox)
        device = self.channel.device
        if self._inbox.device != device.name:
            raise ProtocolError(f"{self.name} answers over {self._inbox.device}, we over {device.name}")
        self.layout = key_inbox(plan, index, len(client.spec.numeric))
        self._copies = client.copies_on(device)
        places = [answer_word(plan, index, b.index) for b in plan.buckets[index]]
        self._words = [Word(self._copies, at, self.channel) for at in places]
        self.mapped = self.channel.map(self._inbox.view())
        entry = self.layout.entry
        self._ring = None if self.mapped else device.allocate(DEPTH * entry)
        self._looked = Word(self._copies, words_at(plan, index), self.channel)
        self._requests = Producer(
            self.channel,
            self._inbox.view(0, 8),
            slots=[self._inbox.view(self.layout.place(n), entry) for n in range(DEPTH)],
            source=[] if self._ring is None else [self._ring.view(n * entry, entry) for n in range(DEPTH)],
            credit=self._looked,
            label=f"{self.name}, requests",
        )
        self._accepted = self._number = 0  # requests that have a place in the ring, and those that are in it
        self._last = [0] * len(plan.buckets[index])  # by bucket: the number of its last request in the ring
        # What was handed to a device goes in its order: so where it is slow, what is urgent waits here.
        self._window = None if self.mapped else SendWindow()
        self._places: dict[int, tuple[int, int]] = {}  # by bucket: urgency and number of the last request that waits
        self._turn = threading.Lock()  # a thread of the device sends what had to wait

    def open(self) -> None:
        """Tells the server where this worker's memory is."""
        client, copies = self._client, self._copies.remote("write").pack()
        endpoint = WorkerEndpoint(copies, copies)
        key = f"{client.name}/{client.member.name}/{self.name}"
        client.member.client.publish(key, msgspec.msgpack.encode(endpoint), to=[self.name])

    @property
    def failure(self) -> BaseException | None:
        """What became of a request that failed, if one did."""
        return self._requests.failure if self._window is None else self._window.error

    def close(self) -> None:
        """Gives back what is not the client's."""
        if self._ring is not None:
            self._ring.close()
        unmap(self.channel, self._inbox)

    def word(self, bucket: int) -> Word:
        """How many answers about a bucket there have been."""
        return self._words[bucket]

    def wait_for_request(self, bucket: int, timeout: float) -> None:
        """Returns when the server has looked at the last request for a bucket. Raises `WaitTimeout` or `PeerLost`."""
        if self._window is not None and bucket in self._places:
            self._window.flush(timeout)
        self.wait_until_looked(self._last[bucket], timeout)

    def wait_until_looked(self, number: int, timeout: float) -> None:
        """Returns when the server has looked at the request of that number. Raises `WaitTimeout` or `PeerLost`."""
        self._looked.wait(number, timeout)

    def has_looked(self, bucket: int) -> bool:
        """Whether the server has looked at the last request for a bucket."""
        return bucket not in self._places and self._looked.value >= self._last[bucket]

    def send(
        self,
        operation: KeyOperation,
        buckets: Sequence[Bucket],
        options: bytes,
        urgency: int,
        sizes: Sequence[int] = (),
    ) -> None:
        """Sends a request, now or in its turn. Raises `WaitTimeout` where the server takes no more.

        ``sizes``: how many bytes of each bucket's slot travel with it; empty: none.
        """
        self._accepted = number = self._accepted + 1
        if self._window is None:
            self._write(operation, buckets, options)
            return
        if number > DEPTH:  # so that nobody waits for a place in the ring later, in a thread of the device
            self._looked.wait(number - DEPTH, self._client.timeout)
        with self._turn:
            for bucket in buckets:  # no request overtakes an earlier one for the same bucket
                urgency = max(urgency, self._places.get(bucket.index, (urgency, 0))[0])
            self._places.update((bucket.index, (urgency, number)) for bucket in buckets)
        runs = self._runs(buckets, sizes) if sizes else []
        self._window.submit(
            (urgency, 0), sum(sizes), partial(self._write_in_turn, number, operation, buckets, options, runs)
        )

    def announce(self, operation: KeyOperation, options: bytes) -> int:
        """Sends a request that names no bucket, after all others, and returns its number."""
        if self._window is not None:
            self._window.flush(self._client.timeout)
        self.send(operation, (), options, 0)
        return self._number

    def _runs(self, buckets: Sequence[Bucket], sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        """Spans ``(space, shard, nbytes)`` of what travels from slots that lie side by side."""
        runs: list[tuple[int, int, int]] = []
        for b, size in sorted(zip(buckets, sizes, strict=True), key=lambda each: each[0].space):
            if runs:
                space, shard, nbytes = runs[-1]
                if (b.space, b.shard) == (space + nbytes, shard + nbytes):
                    runs[-1] = (space, shard, nbytes + size)
                    continue
            runs.append((b.space, b.shard, size))
        return runs

    def _write_in_turn(
        self,
        accepted: int,
        operation: KeyOperation,
        buckets: Sequence[Bucket],
        options: bytes,
        runs: Sequence[tuple[int, int, int]],
    ) -> Completion:
        """Writes the slots, then the request."""
        with self._turn:
            for bucket in buckets:
                if self._places.get(bucket.index, (0, 0))[1] == accepted:
                    del self._places[bucket.index]
            if runs:
                source = self._client.source_on(self.channel.device)
                for space, shard, nbytes in runs:
                    self._requests.put(source.view(space, nbytes), self._inbox.view(self.layout.slots + shard, nbytes))
            return self._write(operation, buckets, options)

    def _write(self, operation: KeyOperation, buckets: Sequence[Bucket], options: bytes) -> Completion:
        self._number = number = self._number + 1
        room = self._requests.slot(number, self._client.timeout)
        indices = [b.index for b in buckets]
        for index in indices:
            self._last[index] = number
        nbytes = pack_request(room, operation, number, options, indices)
        return self._requests.send(number, nbytes=nbytes)


def pack_options(values: Sequence[float]) -> bytes:
    """The option block of a request."""
    return struct.pack(f"<{len(values)}d", *values)
