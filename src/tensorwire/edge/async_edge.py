"""Static edges whose ends need no Python, for adapters in C++, which call tensorwire/async_edges.h.

Python connects them. Each has one slot or more in the consumer's memory, an arrival word there, and a credit word at
the producer, as in `tensorwire.edge.static`. The words of a device lie in one region, which one thread polls.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

import msgspec

from tensorwire._native import SLOT_HEADER, AsyncConsumer, AsyncProducer, Connection, Memory, Watcher
from tensorwire.device import Channel, Device, Region, RemoteRegion
from tensorwire.device.meeting import Meeting, exchange
from tensorwire.device.tcp import TcpChannel, TcpDevice
from tensorwire.edge.async_posts import AsyncPosts, WriteSlot
from tensorwire.errors import ArgumentError, OutOfMemory, ProtocolError
from tensorwire.sizes import round_up

_LINE = 64  # bytes from one word or slot to the next: no two share a cache line
MOST_EDGES = 1 << 14  # of a device

Side = Literal["producer", "consumer"]
Ring = tuple[int, int, int, int]  # where the first slot is, bytes from one to the next, bytes of one, how many


class _Offer(msgspec.Struct, frozen=True, tag="tensorwire async edge 1", forbid_unknown_fields=True):
    """One end's message: what it takes the edge for, and where its word and its slots lie."""

    side: Side
    carries: str
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=2**48)]
    depth: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    words: bytes
    word: Annotated[int, msgspec.Meta(ge=0, le=2**48)]
    slots: bytes = b""
    lends: bytes = b""


_offer = msgspec.msgpack.Decoder(_Offer)


class AsyncEdges:
    """The edges of one device. They live as long as the device: programs in C++ may use their ends until then.

    Args:
        device: The device.
        seconds: How long a send or a receive may take.
        lends: Memory of this process that sends do not copy from, where the device maps: consumers read there, and what
            lies there must not change before they have released it.

    Raises:
        OutOfMemory: There is no memory for their words.
    """

    def __init__(self, device: Device, seconds: float, lends: Memory | None = None) -> None:
        self._device, self._seconds = device, seconds
        self._lends = device._adopt(lends) if lends is not None and device.capabilities.maps else None
        self._words = device.allocate(_LINE * MOST_EDGES)
        self._posts = None if device.capabilities.maps or isinstance(device, TcpDevice) else AsyncPosts()
        self._watcher = Watcher(self._words, naps=self._posts is not None)  # which no NIC wakes
        self._numbers = itertools.count()
        self._kept: list[object] = []

    def connect(
        self,
        channel: Channel,
        pipe: Meeting,
        side: Side,
        *,
        carries: str,
        nbytes: int,
        depth: int = 2,
        timeout: float,
        seconds: float | None = None,
    ) -> AsyncProducer | AsyncConsumer:
        """One end of an edge to the process at the other end of ``channel``, which connects the other end.

        Args:
            channel: The channel.
            pipe: As for ``connect_edge``.
            side: Which end this process has.
            carries: What both ends take the edge for, in words that they must share, such as a dtype and a shape.
            nbytes: Bytes of a slot.
            depth: How many slots.
            timeout: Seconds to wait for the other process.
            seconds: How long a send or a receive may take; None: as for the device's others.

        Returns:
            The end; its ``address`` is what the functions take.

        Raises:
            ArgumentError: The two ends differ.
            OutOfMemory: There is no memory for this end.
            PeerLost, WaitTimeout: The other process ends, or does not answer in time.
            ProtocolError: Something else than Tensorwire answers.
        """
        mapped = channel.device.capabilities.maps
        number = next(self._numbers)
        if number >= MOST_EDGES:
            raise OutOfMemory(f"a device has {MOST_EDGES} edges for programs in C++")
        word, nbytes = _LINE * number, SLOT_HEADER + nbytes
        ring = (0, round_up(nbytes, _LINE), nbytes, depth)
        ours = None if side == "producer" and mapped else self._device.allocate(ring[1] * depth)
        self._kept.append(ours)
        slots = b"" if side == "producer" or ours is None else ours.remote("write").pack()
        lends = b"" if side == "consumer" or self._lends is None else self._lends.remote("read").pack()
        offer = _Offer(side, carries, nbytes, depth, self._words.remote("write").pack(), word, slots, lends)
        theirs = _agree(offer, pipe, timeout)
        words, limit = RemoteRegion.unpack(theirs.words), self._seconds if seconds is None else seconds
        common = self._watcher, word, channel.liveness, limit
        end: AsyncProducer | AsyncConsumer
        if side == "producer":
            there = RemoteRegion.unpack(theirs.slots)
            if ours is None:
                end = AsyncProducer.mapped(
                    *common, _map(channel, there), ring, _map(channel, words), theirs.word, self._lends
                )
            elif self._posts is not None:
                post = self._posts.add(_writes(channel, words, theirs.word, ours, there, ring))
                end = AsyncProducer.queued(*common, self._posts.queue, post, ours, ring)
            else:
                keys = (there.key, ring, words.key, theirs.word)
                end = AsyncProducer.posted(*common, _connection(channel), ours, ring, *keys)
        else:
            assert ours is not None
            if mapped:
                lent = _map(channel, RemoteRegion.unpack(theirs.lends)) if theirs.lends else None
                end = AsyncConsumer.mapped(*common, ours, ring, _map(channel, words), theirs.word, lent)
            elif self._posts is not None:
                post = self._posts.add(_writes(channel, words, theirs.word))
                end = AsyncConsumer.queued(*common, ours, ring, self._posts.queue, post)
            else:
                end = AsyncConsumer.posted(*common, ours, ring, _connection(channel), words.key, theirs.word)
        self._kept.append(end)
        return end

    def close(self) -> None:
        """Whatever still waits is told that it is lost. Idempotent."""
        self._watcher.close()
        if self._posts is not None:
            self._posts.close()


def _map(channel: Channel, region: RemoteRegion) -> Memory:
    found = channel.map(region.view())
    assert found is not None  # the device maps
    return found


def _connection(channel: Channel) -> Connection:
    assert isinstance(channel, TcpChannel)
    return channel.connection


def _writes(
    channel: Channel,
    words: RemoteRegion,
    word: int,
    ours: Region | None = None,
    there: RemoteRegion | None = None,
    ring: Ring = (0, 0, 0, 1),
) -> WriteSlot:
    """What writes the slot of a step, from our ring to the one over there, and raises the word."""
    arrival = words.view(word, 8)
    first, stride, _, depth = ring

    def write(step: int, nbytes: int) -> object:
        if ours is None or there is None:
            return channel.signal(arrival, step)
        at = first + step % depth * stride
        return channel.write(ours.view(at, nbytes), there.view(at, nbytes), (arrival, step))

    return write


def _agree(ours: _Offer, pipe: Meeting, timeout: float) -> _Offer:
    """The other end's offer. Raises `ProtocolError` or `ArgumentError`."""
    message = exchange(pipe, msgspec.msgpack.encode(ours), timeout)
    try:
        theirs = _offer.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ProtocolError("the other process does not connect an edge here: use the same version in both") from None
    if theirs.side == ours.side:
        raise ArgumentError(f"both ends are the {ours.side}'s: one process sends, the other receives")
    for name in ("carries", "nbytes", "depth"):
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            raise ArgumentError(f"the two ends differ: {name} is {here!r} here and {there!r} there")
    return theirs
