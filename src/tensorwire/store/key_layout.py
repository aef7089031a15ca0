"""What a worker and a server of a store of keys share: memory for requests, values and answers.

A *request* names buckets and what is wanted of them. Requests lie in a ring in the server's memory. What is pushed with
a request is written into the buckets' slots ahead of it, by the same lane, so that its signal says that all is there.
In the worker's memory one word says how many of its requests the server has looked at. Each bucket has a word there,
too: how many answers there were. A pull is answered with the values. Where rounds are those of all workers, a push is
answered when the round closes; where each push is applied by itself, it has been when its request was looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec

from tensorwire.errors import ProtocolError
from tensorwire.sizes import round_up
from tensorwire.store.sharding import PAGE, StorePlan
from tensorwire.store.store_layout import WORD

DEPTH = 64  # requests that a worker may be ahead of a server
MOST_BUCKETS = 64  # of one request
REQUEST_BYTES = 1 << 20  # that are pushed with one request, unless one bucket has more

_HEAD = struct.Struct("<4sHHQII")  # magic, version, operation, number, options, buckets
_MAGIC = b"TWKV"
_VERSION = 1


class KeyOperation(IntEnum):
    """What a worker asks of a server."""

    PUSH = 1  # contribute what is in the slots
    PULL = 2  # send the values
    PUSHPULL = 3  # contribute, then send the values
    ASSIGN = 4  # worker 0: the values become what is in the slots
    READY = 5  # worker 0: all values are there, others may begin
    LOAD = 6  # worker 0: its state becomes the rule's
    FINISH = 7  # this worker is done


PUSHES = (KeyOperation.PUSH, KeyOperation.PUSHPULL)
WORKER_0 = (KeyOperation.ASSIGN, KeyOperation.READY, KeyOperation.LOAD)  # what it alone may ask


class KeyRequest(NamedTuple):
    """One request. ``options``: the packed option block; ``buckets``: their indices on the server."""

    operation: KeyOperation
    number: int
    options: bytes
    buckets: tuple[int, ...]


def request_bytes(options: int) -> int:
    """The size of a place in the ring, for so many numeric options."""
    return round_up(_HEAD.size + 8 * options + 4 * MOST_BUCKETS, WORD)


def pack_request(room: memoryview, operation: int, number: int, options: bytes, buckets: Sequence[int]) -> int:
    """Writes a request, and returns its size. ``options``: the packed block."""
    _HEAD.pack_into(room, 0, _MAGIC, _VERSION, operation, number, len(options), len(buckets))
    end = _HEAD.size + len(options)
    room[_HEAD.size : end] = options
    struct.pack_into(f"<{len(buckets)}I", room, end, *buckets)
    return end + 4 * len(buckets)


def unpack_request(room: memoryview, options: int, buckets: int) -> KeyRequest:
    """The request there, for a server with so many ``buckets``. Raises `ProtocolError` for a malformed one."""
    magic, version, operation, number, length, count = _HEAD.unpack_from(room)
    known = operation in KeyOperation._value2member_map_
    if magic != _MAGIC or version != _VERSION or length != 8 * options or count > MOST_BUCKETS or not known:
        raise ProtocolError("a worker's request is malformed")
    end = _HEAD.size + length
    found = struct.unpack_from(f"<{count}I", room, end)
    if count and max(found) >= buckets:
        raise ProtocolError(f"a worker's request names bucket {max(found)}, and there are {buckets}")
    return KeyRequest(KeyOperation(operation), number, bytes(room[_HEAD.size : end]), found)


class KeyInbox(msgspec.Struct, frozen=True):
    """A worker's memory on a server: the ring's word, the ring, the slots."""

    entry: int  # bytes of a place in the ring
    slots: int  # where the slots begin
    nbytes: int

    def place(self, number: int) -> int:
        """Where the ring's place of that number is, from 0."""
        return WORD + number * self.entry


def key_inbox(plan: StorePlan, server: int, options: int) -> KeyInbox:
    """The inbox that every worker has on ``server``."""
    entry = request_bytes(options)
    slots = round_up(WORD + DEPTH * entry, PAGE)
    return KeyInbox(entry, slots, slots + plan.shard_bytes[server])


def words_at(plan: StorePlan, server: int) -> int:
    """Where, in a worker's memory, a server's words begin: one for requests, and then one for each of its buckets."""
    return sum(WORD * (1 + len(buckets)) for buckets in plan.buckets[:server])


def answer_word(plan: StorePlan, server: int, bucket: int) -> int:
    """Where the word of a server's bucket is."""
    return words_at(plan, server) + WORD * (1 + bucket)


def values_at(plan: StorePlan) -> int:
    """Where, behind the words of all servers, the values begin, laid out as the space."""
    return round_up(words_at(plan, len(plan.buckets)), PAGE)
