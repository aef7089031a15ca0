"""Where a shard's part of a version goes: into the file, on the machine that has it, or there over a network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tensorwire.control import Member
from tensorwire.control.locality import why_not_shm
from tensorwire.edge.unannounced import Writes
from tensorwire.store.admission import check_memory
from tensorwire.store.endpoints import find
from tensorwire.store.versions.handover import PUBLISHER, ask, find_announcement
from tensorwire.store.versions.version_files import map_buffer
from tensorwire.store.versions.version_layout import FilePlace

Rooms = list[list[npt.NDArray[np.uint8]]]  # by bucket, for its pieces


class ShardParts(Protocol):
    """A shard's part of each snapshot buffer."""

    def room(self, buffer: int, bucket: int) -> list[npt.NDArray[np.uint8]]:
        """Where the pieces of a bucket are to be copied."""

    def filled(self, buffer: int, bucket: int) -> None:
        """They have been. It does not wait until they have arrived."""

    def arrived(self) -> None:
        """Returns when all that was filled is in the publisher's memory. Raises `PeerLost`, or why the job ended."""

    def close(self) -> None:
        """The store has ended."""


def find_parts(
    member: Member, store: str, shard: int, places: Sequence[Sequence[FilePlace]], sizes: tuple[int, int], count: int
) -> ShardParts:
    """Those of ``shard``, in ``count`` snapshot buffers; ``sizes``: of the file, and of the shard, in bytes."""
    found = find_announcement(member, store)
    if why_not_shm(found.where, member.where) is None:
        return _Mapped(ask(found.socket, count), sizes[0], places)
    return _Sent(member, store, shard, places, sizes[1], count)


class _Mapped(ShardParts):
    """The buffers are files on this machine, of these descriptors."""

    def __init__(self, descriptors: list[int], nbytes: int, places: Sequence[Sequence[FilePlace]]) -> None:
        self._rooms: list[Rooms] = []
        for fd in descriptors:
            file = map_buffer(fd, nbytes)
            os.close(fd)
            self._rooms.append([[np.frombuffer(file, np.uint8, p.nbytes, p.file) for p in b] for b in places])

    def room(self, buffer: int, bucket: int) -> list[npt.NDArray[np.uint8]]:
        return self._rooms[buffer][bucket]

    def filled(self, buffer: int, bucket: int) -> None:
        """It is where it belongs."""

    def arrived(self) -> None:
        """It is."""

    def close(self) -> None:
        """The files are the publisher's."""


class _Sent(ShardParts):
    """The buffers are on another machine: a copy of the shard is kept here, and written there one-sidedly.

    Without that copy a bucket could not change until a network has taken it.
    """

    def __init__(
        self, member: Member, store: str, shard: int, places: Sequence[Sequence[FilePlace]], nbytes: int, count: int
    ) -> None:
        check_memory(nbytes, f"{store}, for versions of it,")
        self._member, self._places = member, places
        channel = member.channel(PUBLISHER)
        self._region = channel.device.allocate(nbytes)
        self._buffers = [find(member, buffer_name(store, n, shard), PUBLISHER)[0] for n in range(count)]
        memory = memoryview(self._region)
        self._rooms = [[np.frombuffer(memory, np.uint8, p.nbytes, p.shard) for p in b] for b in places]
        self._writes = Writes(channel)

    def room(self, buffer: int, bucket: int) -> list[npt.NDArray[np.uint8]]:
        return self._rooms[bucket]

    def filled(self, buffer: int, bucket: int) -> None:
        there = self._buffers[buffer]
        for p in self._places[bucket]:
            self._writes.begin(self._region.view(p.shard, p.nbytes), there.view(p.file, p.nbytes))

    def arrived(self) -> None:
        self._member.outwait(self._writes.wait)

    def close(self) -> None:
        self._rooms = []
        self._region.close()


def buffer_name(store: str, number: int, shard: int) -> str:
    """What both ends call snapshot buffer ``number`` where a shard on another machine writes to it."""
    return f"{store}/buffer {number} of shard {shard}"
