"""Moving any amount of state between a worker and a server, part by part through one slot.

The receiver owns the slot. The sender writes a part, signals, and writes the next one when the receiver has returned
the slot. A part is a head, then values, then a table that describes them. Every part carries the right to write the
sender's credit word, so the receiver needs no other message. Only saving and loading use this.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator
from math import prod
from types import TracebackType

import msgspec

from tensorwire.device import Channel, RemoteRegion
from tensorwire.edge import Consumer, Producer, Word
from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ProtocolError, TensorwireError
from tensorwire.messages import decode_message
from tensorwire.store.sharding import PAGE, PARAMETER_DTYPES

PART_BYTES = 4 << 20
CREDIT_SECONDS = 60.0  # a receiver only copies a part away
_HEAD = struct.Struct("<4sHHIQ32s8x")  # magic, version, last, bytes of the table, its offset, the credit's capability
_MAGIC = b"TWST"
_VERSION = 1
_LEAST = 4096  # bytes: smaller rests of a slot are not worth an entry
_ENTRY_SLACK = 64  # what an entry's numbers may add to its size
_GIVEN_UP = 2**62  # a credit beyond every part


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Elements ``start`` to ``stop`` of what an optimizer keeps under ``key`` for tensor ``tensor`` of the plan.

    ``shape`` is that of the whole value. ``rows``: it has an element for each of the tensor's, and is cut with it.
    ``kind``: empty for a tensor, `NUMBER`, `GROUP` (a number of the tensor's parameter group), `VALUE` (the parameter
    itself), or the type of a value that cannot be sent.
    """

    tensor: int
    key: str
    dtype: str
    shape: tuple[int, ...]
    rows: bool
    start: int
    stop: int
    kind: str = ""

    @property
    def nbytes(self) -> int:
        """Size of these elements."""
        return (self.stop - self.start) * DTYPES[self.dtype]


NUMBER, GROUP, VALUE = "number", "group", "value"
KINDS = ("", NUMBER, GROUP, VALUE)
MASTER = "master"  # the key of the float32 values that a half-precision parameter is rounded from
Item = tuple[Entry, memoryview]  # the memory holds these elements and nothing else
_Table = list[tuple[int, Entry]]  # with the offset of each entry's elements in the part


class Ask(msgspec.Struct, frozen=True):
    """Worker ``worker`` wants the state. ``endpoints[s]`` opens a slot for shard ``s``."""

    worker: int
    endpoints: list[bytes]


def ask_key(store: str, number: int) -> str:
    """Where the `Ask` of that number is published."""
    return f"{store}/ask/{number}"


def load_key(store: str, step: int, server: str, shard: int) -> str:
    """Where the server of that name publishes the slot that a worker sends a shard's state to in round ``step``."""
    return f"{store}/load/{step}/{server}/{shard}"


class StateSender:
    """Fills the slot that ``endpoint`` describes, which a `StateReceiver` at the other end of ``channel`` opened."""

    def __init__(self, channel: Channel, endpoint: bytes) -> None:
        slot = RemoteRegion.unpack(endpoint)
        if slot.device != channel.device.name or slot.length != PAGE + PART_BYTES:
            raise ProtocolError("state cannot be sent: the other side opened another kind of memory")
        self._credit = channel.device.allocate(PAGE)
        self._staging = None if channel.device.capabilities.maps else channel.device.allocate(PART_BYTES)
        self._edge = Producer(
            channel,
            slot.view(0, 8),
            slots=[slot.view(PAGE, PART_BYTES)],
            source=[] if self._staging is None else [self._staging.view()],
            credit=Word(self._credit, 0, channel),
        )
        self._parts = 0
        self._begin()

    def _begin(self) -> None:
        """The next part."""
        self._parts += 1
        self._memory = self._edge.slot(self._parts, CREDIT_SECONDS)
        self._used, self._table_bytes = _HEAD.size, 8
        self._table: _Table = []

    def send(self, items: Iterable[Item]) -> None:
        """Returns when all of it is in the receiver's memory.

        Raises `RemoteAccessError` or `WaitTimeout` (the receiver gave up), or `PeerLost`.
        """
        for entry, data in items:
            size, sent = DTYPES[entry.dtype], 0
            cost = len(msgspec.msgpack.encode(entry)) + _ENTRY_SLACK
            while sent < data.nbytes:
                room = PART_BYTES - self._used - self._table_bytes - cost
                if room < min(_LEAST, data.nbytes - sent):
                    self._send_part(last=False)
                    self._begin()
                    continue
                nbytes = min(data.nbytes - sent, room // size * size)
                self._memory[self._used : self._used + nbytes] = data[sent : sent + nbytes]
                start = entry.start + sent // size
                chunk = msgspec.structs.replace(entry, start=start, stop=start + nbytes // size)
                self._table.append((self._used, chunk))
                self._used, self._table_bytes, sent = self._used + nbytes, self._table_bytes + cost, sent + nbytes
        self._send_part(last=True)

    def _send_part(self, *, last: bool) -> None:
        table = msgspec.msgpack.encode(self._table)
        end = self._used + len(table)
        self._memory[self._used : end] = table
        credit = self._credit.remote("write").pack()
        self._memory[: _HEAD.size] = _HEAD.pack(_MAGIC, _VERSION, last, len(table), self._used, credit)
        self._edge.send(self._parts, nbytes=end).wait(CREDIT_SECONDS)

    def __enter__(self) -> StateSender:
        return self

    def __exit__(self, *_: object) -> None:
        self._credit.close()
        if self._staging is not None:
            self._staging.close()


class StateReceiver:
    """A slot in our memory; ``endpoint`` lets the process at the other end of ``channel`` send through it, once."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._region = channel.device.allocate(PAGE + PART_BYTES)
        self._part = memoryview(self._region)[PAGE:]
        self._edge = Consumer(Word(self._region, 0, channel), slots=[self._part])
        self._whole = False
        self.endpoint = self._region.remote("write").pack()

    def receive(self, timeout: float) -> Iterator[Item]:
        """What is sent, in its order; each memory is valid until the next is asked for.

        ``timeout``: seconds to wait for a part. Raises `WaitTimeout`, `PeerLost` or `ProtocolError`.
        """
        for number in itertools.count(1):
            self._edge.receive(number, timeout)
            last, credit, table = _unpack(self._part)
            self._edge.credit_to(self._channel, credit.view(0, 8))
            for offset, entry in table:
                yield entry, self._part[offset : offset + entry.nbytes]
            if last:
                self._whole = True
                return
            self._edge.release(number)

    def __enter__(self) -> StateReceiver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Frees the slot. A sender that still waits for it hears that nobody receives any more."""
        self._region.close()
        if self._whole or not any(self._part[: _HEAD.size]):
            return
        try:  # nothing is written any more: what came last is to be read
            self._edge.credit_to(self._channel, _unpack(self._part)[1].view(0, 8))
            self._edge.release(_GIVEN_UP)
        except TensorwireError:
            pass  # the sender is gone, or waits in vain, for a minute
        self._whole = True


def _unpack(part: memoryview) -> tuple[bool, RemoteRegion, _Table]:
    """Raises `ProtocolError` for anything but what a `StateSender` made."""
    magic, version, last, nbytes, at, credit = _HEAD.unpack_from(part)
    if magic != _MAGIC or version != _VERSION or at < _HEAD.size or at + nbytes > part.nbytes:
        raise ProtocolError("a part of an optimizer's state has a malformed head")
    try:
        table = decode_message(part[at : at + nbytes], _Table)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a part of an optimizer's state has a malformed table: {error}") from None
    for offset, entry in table:
        known = entry.dtype in PARAMETER_DTYPES and 0 <= entry.start <= entry.stop <= prod(entry.shape)
        if not known or offset < _HEAD.size or offset + entry.nbytes > at:
            raise ProtocolError(f"a part of an optimizer's state has a malformed entry: {entry}")
    return bool(last), RemoteRegion.unpack(credit), table
