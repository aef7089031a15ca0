"""A worker's side of a store of keys: requests to its servers, and the memory that values come from and go to.

Imports no framework. Several threads may use it if they take turns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from tensorwire._native import Window, copy_is_large
from tensorwire.control import Member
from tensorwire.device import Device, Region
from tensorwire.edge import Word
from tensorwire.edge.tensor import copy_tensor
from tensorwire.edge.words import wait_unless
from tensorwire.errors import JobEnded
from tensorwire.observe import counters
from tensorwire.store.bucket_code import encoders
from tensorwire.store.endpoints import show
from tensorwire.store.key_layout import (
    CARRYING,
    MOST_BUCKETS,
    PUSHES,
    REQUEST_BYTES,
    WANTING,
    answer_word,
    telling,
    values_at,
)
from tensorwire.store.modes import Sync
from tensorwire.store.request_client import RequestClient
from tensorwire.store.request_link import RequestOperation, StoreRequests, Transfer
from tensorwire.store.sharding import PAGE, Bucket, StorePlan
from tensorwire.store.store_layout import StoreSpec


class KeyClient(RequestClient):
    """One worker's end of the store of keys ``name``. All workers have to `agree` on it before."""

    def __init__(self, member: Member, name: str, spec: StoreSpec, plan: StorePlan) -> None:
        super().__init__(member, name, spec, plan)
        self._sources: dict[str, Region] = {}  # by device: what is pushed leaves from, laid out as the space
        self._copies: dict[str, Region] = {}  # by device: where answers and values come to
        self.servers: list[_Server] = [_Server(self, s) for s in range(plan.servers)]
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
        places = [slice(at, at + t.nbytes) for at, t in zip(plan.offsets, plan.tensors, strict=True)]
        self._rooms = [(self._filled[place], copy_is_large(place.stop - place.start)) for place in places]
        count = sum(map(len, plan.buckets))
        self.asked = [0] * count  # by the bucket's number: answers that were asked for
        self._taken = [0] * count  # and the one that says that its slot is free; 0: the credit of requests does
        self._together, self._telling = isinstance(spec.mode, Sync), telling(spec.mode)
        for server in self.servers:
            show(member, name, server.name, self.copies_on(server.channel.device))

    def source_on(self, device: Device) -> Region:
        """That device's memory that pushes leave from, where servers' memory cannot be mapped."""
        if device.name not in self._sources:
            self._sources[device.name] = self.allocate(device, max(PAGE, self.plan.space_bytes))
        return self._sources[device.name]

    def copies_on(self, device: Device) -> Region:
        """That device's memory that answers and values come to: one file, not one for each server."""
        if device.name not in self._copies:
            self._copies[device.name] = self.allocate(device, max(PAGE, values_at(self.plan) + self.plan.space_bytes))
        return self._copies[device.name]

    def _place_slots(self) -> Window:
        window = Window(self.plan.space_bytes, shared=True)
        for index, at, shard, nbytes in self.plan.runs():
            server = self.servers[index]
            if server.mapped is not None:
                window.place(at, server.mapped, shard, nbytes)
            else:
                window.place(at, self.source_on(server.channel.device), at, nbytes)
        return window

    def _place_values(self) -> Window:
        window = Window(self.plan.space_bytes, shared=True)
        for index, at, _, nbytes in self.plan.runs():
            window.place(at, self.copies_on(self.servers[index].channel.device), values_at(self.plan) + at, nbytes)
        return window

    # ---- memory

    def slot(self, tensor: int) -> memoryview:
        """Where the elements of a tensor are to be before they are pushed; see `wait_for_slot`."""
        return self._rooms[tensor][0]

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
        server, answer = self.servers[bucket.server], self._taken[bucket.number]
        if answer:
            self.wait_for(bucket, answer, timeout)
        elif not server.has_looked(bucket.index):
            self._wait(server, partial(server.wait_until_looked, bucket.index), timeout)

    def push_is_applied(self, bucket: Bucket) -> bool:
        """Whether the last push of a bucket has been applied."""
        server, answer = self.servers[bucket.server], self._taken[bucket.number]
        if answer:
            return server.words[bucket.index].value >= answer
        return server.has_looked(bucket.index)

    def fill(self, tensor: int, values: object) -> None:
        """Copies an array on the CPU, of the tensor's size and dtype, into its slot. Raises `ArgumentError`."""
        room, large = self._rooms[tensor]
        copy_tensor(room, values, large)
        counters.copied(room.nbytes)

    def forget(self) -> None:
        """Values were set: nothing is left to be added to the next pushes."""
        for encoder in self._encoders.values():
            encoder.reset(self._slots)

    def _encode(self, operation: RequestOperation, bucket: Bucket) -> int:
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
        counters.copied(nbytes)
        return nbytes

    # ---- requests

    def request(self, operation: RequestOperation, tensors: Iterable[int], options: bytes, urgency: int = 0) -> None:
        """Asks the servers of ``tensors`` for it. What is to be pushed lies in the slots.

        Smaller ``urgency`` first, where requests have to wait for those before them.

        Raises `PeerLost`, `WaitTimeout` where servers take no more requests, or `JobEnded` after `finish`.
        """
        if self.step < 0:
            raise JobEnded("this worker has left the job")
        waiting: list[list[Bucket]] = [[] for _ in self.servers]
        nbytes = [0] * len(self.servers)
        carrying = operation in CARRYING
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

    def _send(
        self, server: int, operation: RequestOperation, buckets: list[Bucket], options: bytes, urgency: int
    ) -> None:
        carrying = operation in CARRYING
        sizes = [self._encode(operation, bucket) for bucket in buckets] if carrying else []
        if operation in PUSHES:
            self.produced[server] += len(buckets)
            counters.add(pushes=len(buckets))
        answered, tells = self._together or operation in WANTING, operation in self._telling
        self.servers[server].request(operation, buckets, options, urgency, sizes, tells)
        for bucket in buckets:
            self.asked[bucket.number] += answered
            if carrying:
                self._taken[bucket.number] = self.asked[bucket.number] if tells else 0

    # ---- answers

    def answered(self, tensor: int, asked: Sequence[int]) -> bool:
        """Whether the servers have given so many answers about each bucket of a tensor."""
        return all(
            self.servers[b.server].words[b.index].value >= number
            for b, number in zip(self.buckets[tensor], asked, strict=True)
        )

    def wait_for(self, bucket: Bucket, number: int, timeout: float | None = None) -> None:
        """Returns when there have been so many answers about a bucket. Raises `PeerLost` or `WaitTimeout`."""
        server = self.servers[bucket.server]
        word = server.words[bucket.index]
        if word.value < number:
            self._wait(server, partial(word.wait, number), timeout)

    def _wait(self, server: _Server, wait: Callable[[float], object], timeout: float | None) -> None:
        """``wait(seconds)``, unless a request could not be sent."""

        def failure() -> BaseException | None:
            error = server.failure
            if error is not None:
                self.course.begin(f"a request of keys to {server.name}")
                self.course.note(error)
            return error

        seconds = self.timeout if timeout is None else timeout
        self.member.wait(partial(wait_unless, wait, gone_on=failure), seconds, self.place)

    def count_unsent(self, tensor: int, pushes: int) -> None:
        """This worker's total has pushes of a tensor that were asked for and will not leave, too."""
        for bucket in self.buckets[tensor]:
            self.produced[bucket.server] += pushes


class _Server(StoreRequests):
    """What this worker shares with one server: slots for pushes there, words that count answers here."""

    def __init__(self, client: KeyClient, index: int) -> None:
        buckets = client.plan.buckets[index]
        super().__init__(client.member, client.name, client.links[index], len(buckets), client.timeout)
        self._client: KeyClient = weakref.proxy(client)  # which has this
        copies = client.copies_on(self.channel.device)
        # How many answers about each bucket there have been.
        self.words = [Word(copies, answer_word(client.plan, index, b.index), self.channel) for b in buckets]
        self._whole_buckets: dict[int, list[Transfer]] = {}  # of the plan, prepared

    def request(
        self,
        operation: RequestOperation,
        buckets: Sequence[Bucket],
        options: bytes,
        urgency: int,
        sizes: Sequence[int],
        answered: bool,
    ) -> None:
        """Sends a request. ``sizes``: how many bytes of each bucket's slot travel with it; empty: none."""
        indices = [b.index for b in buckets]
        transfers = self._transfers(buckets, sizes) if sizes and self.mapped is None else ()
        nbytes = sum(sizes)
        self.send(
            operation, options, indices, indices, urgency=urgency, transfers=transfers, nbytes=nbytes, answered=answered
        )

    def _transfers(self, buckets: Sequence[Bucket], sizes: Sequence[int]) -> list[Transfer]:
        """What travels, from slots that lie side by side at once."""
        if len(buckets) == 1 and sizes[0] == buckets[0].nbytes:
            number = buckets[0].number
            if number not in self._whole_buckets:
                self._whole_buckets[number] = self._in_runs(buckets, sizes)
            return self._whole_buckets[number]
        return self._in_runs(buckets, sizes)

    def _in_runs(self, buckets: Sequence[Bucket], sizes: Sequence[int]) -> list[Transfer]:
        runs: list[tuple[int, int, int]] = []
        for b, size in sorted(zip(buckets, sizes, strict=True), key=lambda each: each[0].space):
            if runs:
                space, shard, nbytes = runs[-1]
                if (b.space, b.shard) == (space + nbytes, shard + nbytes):
                    runs[-1] = (space, shard, nbytes + size)
                    continue
            runs.append((b.space, b.shard, size))
        source = self._client.source_on(self.channel.device)
        return [(source.view(space, nbytes), self.memory.view(shard, nbytes)) for space, shard, nbytes in runs]
