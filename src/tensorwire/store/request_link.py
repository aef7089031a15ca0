"""Requests of workers to servers: one link between each worker and each server, whatever the number of their stores.

A link is a ring in the server's memory with places of `ENTRY` bytes. A request has a header, options, and numbers of 4
bytes each, whose meaning is the store's. The bytes that a request brings are written into memory of the store ahead of
it, by the same lane, so that its signal says that all is there. In the worker's memory one word, the credit, says how
many of its requests the server has looked at. Requests of a link are numbered from 1.
"""

from __future__ import annotations

import functools
import struct
import threading
import weakref
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from tensorwire.control import Member
from tensorwire.control.names import member_name
from tensorwire.device import Channel, Completion, RemoteView, View
from tensorwire.device.mapped import unmap
from tensorwire.edge import Consumer, Producer, Word
from tensorwire.errors import ProtocolError
from tensorwire.store.endpoints import find, show
from tensorwire.store.send_window import AHEAD, SendWindow

DEPTH = 64  # requests that a worker may be ahead of a server
ENTRY = 2048  # bytes of a place in the ring
MOST_NUMBERS = 64  # of a request
WORD = 64  # bytes between signal words: each has its cache line
_LINK = "requests"  # what both sides call their memory
_MAGIC = b"TWRQ"
_VERSION = 1
_HEADER = "<4sHHQIII4x"  # magic, version, operation, number, store, bytes of options, count of numbers
_HEAD = struct.Struct(_HEADER)
# Bytes of a request that goes at once where nothing waits: a ring full of such is what may be under way anyhow.
_SMALL = AHEAD // DEPTH
MOST_OPTIONS = (ENTRY - _HEAD.size - 4 * MOST_NUMBERS) // 8  # of 8 bytes each


class RequestOperation(IntEnum):
    """What a worker asks of a store."""

    PUSH = 1  # contribute what lies in the slots
    PULL = 2  # send values
    PUSHPULL = 3  # contribute, then send values
    CHANGES = 4  # of rows: send those that have changed since they were sent last
    ASSIGN = 5  # worker 0: the values become what lies in the slots
    READY = 6  # worker 0: all values are there, others may begin
    LOAD = 7  # worker 0: its state becomes the rule's
    IDLE = 8  # of rows: this worker takes no part in rounds until all are idle
    FINISH = 9  # this worker is done
    CUT = 10  # worker 0: the values of these stores become a version for readers


WORKER_0 = (RequestOperation.ASSIGN, RequestOperation.READY, RequestOperation.LOAD)  # what it alone may ask
_OPERATIONS = RequestOperation._value2member_map_


class Request(NamedTuple):
    """One request. ``options``: the packed option block; ``numbers``: what the store makes of them."""

    operation: RequestOperation
    number: int
    store: int
    options: bytes
    numbers: tuple[int, ...]


def store_number(name: str) -> int:
    """That of ``store/N``."""
    return int(name.rpartition("/")[2])


@functools.lru_cache(256)
def _form(options: int, numbers: int) -> struct.Struct:
    return struct.Struct(f"{_HEADER}{options}s{numbers}I")


def pack_request(
    room: memoryview, operation: RequestOperation, number: int, store: int, options: bytes, numbers: Sequence[int]
) -> int:
    """Writes a request, and returns its size."""
    form = _form(len(options), len(numbers))
    form.pack_into(room, 0, _MAGIC, _VERSION, operation, number, store, len(options), len(numbers), options, *numbers)
    return form.size


def unpack_request(room: memoryview) -> Request:
    """The request there. Raises `ProtocolError` for a malformed one."""
    magic, version, operation, number, store, options, count = _HEAD.unpack_from(room)
    known = _OPERATIONS.get(operation)
    if magic != _MAGIC or version != _VERSION or options > 8 * MOST_OPTIONS or count > MOST_NUMBERS or known is None:
        raise ProtocolError("a worker's request is malformed")
    block, *numbers = struct.unpack_from(f"<{options}s{count}I", room, _HEAD.size)
    return Request(known, number, store, block, tuple(numbers))  # type: ignore[arg-type]


# ---- the worker's end


class RequestLink:
    """A worker's end of the link to one server. Any thread may use it."""

    def __init__(self, member: Member, server: int) -> None:
        self.name = member_name("server", server)
        self.channel: Channel = member.channel(self.name)
        device = self.channel.device
        inbox, _ = find(member, _LINK, self.name)
        self._words = device.allocate(WORD)
        self._ring = ring = None if self.channel.map(inbox.view()) else device.allocate(DEPTH * ENTRY)
        self.looked = Word(self._words, 0, self.channel)
        self.places = [inbox.view(WORD + n * ENTRY, ENTRY) for n in range(DEPTH)]
        self.source = [] if ring is None else [ring.view(n * ENTRY, ENTRY) for n in range(DEPTH)]  # if not mapped
        self.producer = Producer(
            self.channel,
            inbox.view(0, 8),
            slots=self.places,
            source=self.source,
            credit=self.looked,
            label=f"{self.name}, requests",
        )
        self._accepted = self.number = 0  # requests that have a place in the ring, and those that are in it
        self.left = 0  # the last of these that was handed to the device
        self.turn = threading.Lock()  # of the thread that writes: one of the device sends what had to wait
        self._line = threading.Lock()  # of the thread that waits for a place
        show(member, _LINK, self.name, self._words)

    def accept(self, timeout: float) -> int:
        """Waits until there is a place for one more, so that no thread of the device does so later."""
        with self._line:
            if self._accepted >= DEPTH:
                self.looked.wait(self._accepted + 1 - DEPTH, timeout)
            self._accepted += 1
            return self._accepted


_links: weakref.WeakKeyDictionary[Member, list[RequestLink]] = weakref.WeakKeyDictionary()
_linking = threading.Lock()


def links_of(member: Member, servers: int) -> list[RequestLink]:
    """A worker's link to each server, made with its first store. Servers have to know of that store."""
    with _linking:
        if member not in _links:
            _links[member] = [RequestLink(member, server) for server in range(servers)]
        return _links[member]


Transfer = tuple[View, RemoteView]


class StoreRequests:
    """What a worker asks of one server about the store ``name``, and the server's ``memory`` for what goes with that.

    A request has *subjects*, numbered from 0, such as keys; no request overtakes an earlier one for the same subject.
    """

    def __init__(self, member: Member, name: str, link: RequestLink, subjects: int, timeout: float) -> None:
        self.link, self.name, self.channel = link, link.name, link.channel
        self._store, self._timeout = store_number(name), timeout
        self.memory, _ = find(member, name, link.name)
        self.mapped = self.channel.map(self.memory.view())
        # By subject: the number of its last request in the ring that the server says it has looked at.
        self._last = [0] * (subjects + 1)
        self._whole = (subjects,)  # the subject of requests about the store
        # What was handed to a device goes in its order: so where it is slow, what is urgent waits here.
        self._window = SendWindow() if link.source else None
        self._waiting: dict[int, tuple[int, int]] = {}  # by subject: urgency and place in line of what waits last

    @property
    def failure(self) -> BaseException | None:
        """What became of a request that failed, if one did."""
        return self.link.producer.failure or (None if self._window is None else self._window.error)

    def send(
        self,
        operation: RequestOperation,
        options: bytes,
        numbers: Sequence[int],
        subjects: Sequence[int],
        *,
        urgency: int = 0,
        transfers: Sequence[Transfer] = (),
        nbytes: int = 0,
        answered: bool = False,
    ) -> None:
        """Sends a request, now or in its turn: smaller ``urgency`` first.

        ``transfers``: what to write ahead of it, ``nbytes`` in all. ``answered``: an answer alone tells that it was
        looked at. Raises `PeerLost`, or `WaitTimeout` where the server takes no more requests.
        """
        link = self.link
        told = () if answered else subjects
        if self._window is None:
            with link.turn:
                self._write(operation, options, numbers, told)
            return
        place = link.accept(self._timeout)
        if nbytes <= _SMALL and self._window.empty:
            self._send_in_turn(place, operation, options, numbers, subjects, told, transfers)
            return
        with link.turn:
            for subject in subjects:
                urgency = max(urgency, self._waiting.get(subject, (urgency, 0))[0])
            self._waiting.update((subject, (urgency, place)) for subject in subjects)
        send = partial(self._send_in_turn, place, operation, options, numbers, subjects, told, transfers)
        self._window.submit((urgency, 0), nbytes, send)

    def announce(self, operation: RequestOperation, options: bytes) -> int:
        """Sends a request about the store, after all others, and returns its number."""
        self._flush(self._timeout)
        self.send(operation, options, (), self._whole)
        self._flush(self._timeout)
        return self._last[-1]

    def _flush(self, timeout: float) -> None:
        if self._window is not None:
            self._window.flush(timeout)

    def _send_in_turn(
        self,
        place: int,
        operation: RequestOperation,
        options: bytes,
        numbers: Sequence[int],
        subjects: Sequence[int],
        told: Sequence[int],
        transfers: Sequence[Transfer],
    ) -> Completion:
        with self.link.turn:
            for subject in subjects:
                if self._waiting.get(subject, (0, 0))[1] == place:
                    del self._waiting[subject]
            for source, target in transfers:
                self.link.producer.put(source, target)
            return self._write(operation, options, numbers, told)

    def _write(
        self, operation: RequestOperation, options: bytes, numbers: Sequence[int], told: Sequence[int]
    ) -> Completion:
        link = self.link
        number = link.number + 1
        room = link.producer.slot(number, self._timeout)
        nbytes = pack_request(room, operation, number, self._store, options, numbers)
        for subject in told:
            self._last[subject] = number
        if link.source and link.left < link.number:  # an interrupted one: the next signal says that it is there, too
            at = link.number % DEPTH
            link.producer.put(link.source[at], link.places[at])
        # Only now: a request that is interrupted before is none, and one that is interrupted after is sent by the next.
        link.number = number
        completion = link.producer.send(number, nbytes=nbytes)
        link.left = number
        return completion

    def wait_until_looked(self, subject: int, timeout: float) -> None:
        """Returns when the server has looked at the last request for a subject that no answer tells of.

        Raises `WaitTimeout` or `PeerLost`.
        """
        if subject in self._waiting:
            self._flush(timeout)
        self.link.looked.wait(self._last[subject], timeout)

    def has_looked(self, subject: int) -> bool:
        """Whether the server has looked at the last request for a subject that no answer tells of."""
        return subject not in self._waiting and self.link.looked.value >= self._last[subject]

    def wait_until_finished(self, timeout: float) -> None:
        """Returns when the server has done the last request about the store. Raises `WaitTimeout` or `PeerLost`."""
        self.wait_until_looked(self._whole[0], timeout)

    def close(self) -> None:
        """Lets go of the server's memory."""
        unmap(self.channel, self.memory)


# ---- the server's end


class RequestInbox:
    """A server's end of the link to one worker."""

    def __init__(self, member: Member, worker: int, incarnation: int) -> None:
        self.worker, self.name, self.incarnation = worker, member_name("worker", worker), incarnation
        self._member, self._channel = member, member.channel(self.name)
        region = self._channel.device.allocate(WORD + DEPTH * ENTRY)
        memory = memoryview(region)
        places = [memory[WORD + n * ENTRY : WORD + (n + 1) * ENTRY] for n in range(DEPTH)]
        self._ring = Consumer(Word(region, 0, self._channel), slots=places)
        show(member, _LINK, self.name, region)

    def open(self) -> None:
        """Makes the way back, once the worker has said where its memory is. Raises as `find`."""
        words, _ = find(self._member, _LINK, self.name)
        self._channel.map(words.view())  # where that can be: not in the middle of a request
        self._ring.credit_to(self._channel, words.view(0, 8))

    def receive(self, number: int, timeout: float) -> Request:
        """The request of that number. Raises `WaitTimeout`, `PeerLost` or `ProtocolError`."""
        place = self._ring.receive(number, timeout)
        assert place is not None
        request = unpack_request(place)
        if request.number != number:
            raise ProtocolError(f"{self.name} sent request {request.number} in place of {number}")
        return request

    def release(self, number: int) -> None:
        """Tells the worker that requests up to this one have been looked at."""
        self._ring.release(number)
