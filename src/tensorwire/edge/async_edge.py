"""Edges whose ends need no Python, for adapters in C++, which call tensorwire/async_edges.h.

Python connects them. Each has one slot or more in the consumer's memory, an arrival word there, and a credit word at
the producer, as in `tensorwire.edge.static`. The words of a device lie in one region, which one thread polls. The
header of `tensorwire.edge.header` precedes each tensor.
"""

from __future__ import annotations

import itertools
from typing import Annotated

import msgspec

from tensorwire._native import HEADER, AsyncConsumer, AsyncPath, AsyncProducer, Memory, Watcher
from tensorwire.device import Channel, Device, Region, RemoteRegion, RemoteView
from tensorwire.device.meeting import Meeting
from tensorwire.device.tcp import TcpChannel, TcpDevice
from tensorwire.edge.agreement import EdgeOffer, Side, agree
from tensorwire.edge.async_posts import AsyncPosts, WriteSlot
from tensorwire.errors import OutOfMemory
from tensorwire.sizes import round_up

_LINE = 64  # bytes from one word or slot to the next: no two share a cache line
MOST_EDGES = 1 << 14  # of a device


class _Offer(EdgeOffer, frozen=True, tag="tensorwire async edge 2", forbid_unknown_fields=True):
    """One end's message: what it takes the edge for, and where its word and its slots lie."""

    carries: str
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=2**48)]
    depth: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    words: bytes
    word: Annotated[int, msgspec.Meta(ge=0, le=2**48)]
    slots: bytes = b""
    lends: bytes = b""


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
            nbytes: Bytes of the largest tensor that fits into a slot, after its header: larger ones are sent in pieces.
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
        maps = channel.device.capabilities.maps
        number = next(self._numbers)
        if number >= MOST_EDGES:
            raise OutOfMemory(f"a device has {MOST_EDGES} edges for programs in C++")
        word, nbytes = _LINE * number, HEADER + nbytes
        slots = None if side == "producer" and maps else self._device.allocate(round_up(nbytes, _LINE) * depth)
        shown = b"" if side == "producer" or slots is None else slots.remote("write").pack()
        lends = b"" if side == "consumer" or self._lends is None else self._lends.remote("read").pack()
        ours = _Offer(side, carries, nbytes, depth, self._words.remote("write").pack(), word, shown, lends)
        theirs = agree(ours, _alike, pipe, timeout, "AsyncEdges.connect")
        path = self._path(channel, theirs, slots if side == "producer" else None, sends=side == "producer")
        awaited = self._watcher, word, channel.liveness, self._seconds if seconds is None else seconds
        end: AsyncProducer | AsyncConsumer
        lent: tuple[Memory, bytes] | None = None
        if side == "producer":
            if self._lends is not None:
                lent = self._lends, lends
            end = AsyncProducer(awaited, path, (nbytes, depth), lent)
        else:
            assert slots is not None
            if theirs.lends and maps:
                lent = _map(channel, theirs.lends), theirs.lends
            end = AsyncConsumer(awaited, path, (nbytes, depth), slots, lent)
        self._kept.append((slots, end))
        return end

    def _path(self, channel: Channel, theirs: _Offer, source: Region | None, *, sends: bool) -> AsyncPath:
        """How our words, and if this end sends its slots, get to the other end. ``source``: these, unless it maps."""
        words, ring = RemoteRegion.unpack(theirs.words), (theirs.nbytes, theirs.depth)
        there = RemoteRegion.unpack(theirs.slots) if sends else None
        if channel.device.capabilities.maps:
            return AsyncPath.mapped(
                _map(channel, theirs.words), theirs.word, _map(channel, theirs.slots) if sends else None, ring
            )
        if isinstance(channel, TcpChannel):
            key = 0 if there is None else there.key
            return AsyncPath.posted(channel.connection, words.key, theirs.word, source, ring, key)
        assert self._posts is not None
        post = self._posts.add(_writes(channel, words.view(theirs.word, 8), source, there))
        return AsyncPath.queued(self._posts.queue, post, source, ring)

    def close(self) -> None:
        """Whatever still waits is told that it is lost. Idempotent."""
        self._watcher.close()
        if self._posts is not None:
            self._posts.close()


def _alike(offer: _Offer) -> dict[str, object]:
    return {"carries": offer.carries, "nbytes": offer.nbytes, "depth": offer.depth}


def _map(channel: Channel, region: bytes) -> Memory:
    found = channel.map(RemoteRegion.unpack(region).view())
    assert found is not None  # the device maps
    return found


def _writes(channel: Channel, word: RemoteView, source: Region | None, there: RemoteRegion | None) -> WriteSlot:
    """What brings a part of our slots to those over there, and raises the word."""

    def write(signal: int, at: int, nbytes: int) -> object:
        if source is None or there is None or not nbytes:
            return channel.signal(word, signal)
        return channel.write(source.view(at, nbytes), there.view(at, nbytes), (word, signal))

    return write
