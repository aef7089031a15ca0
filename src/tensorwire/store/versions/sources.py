"""Where a reader gets versions from: by one-sided reads, or, on the machine that has them, as files."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tensorwire.control import Member
from tensorwire.device import Completion, Region, RemoteRegion
from tensorwire.edge import Producer
from tensorwire.errors import DeviceError, RemoteAccessError, VersionExpired
from tensorwire.messages import decode_message
from tensorwire.observe import counters
from tensorwire.store.versions.handover import PUBLISHER, ask
from tensorwire.store.versions.listing import ask_publisher
from tensorwire.store.versions.readers import WORD, Hello, Opened, holds, read_board
from tensorwire.store.versions.selection import ReadSpan, Selection
from tensorwire.store.versions.version_files import CURRENT, MODEL, mapped
from tensorwire.store.versions.version_layout import Manifest, VersionLayout, parse_manifest

_PART = 4 << 20  # bytes of one read
_IN_FLIGHT = 8  # reads
Bytes = npt.NDArray[np.uint8]  # one row


class OpenVersion(Protocol):
    """A version that a reader has, and that nobody overwrites, until ``close()``."""

    manifest: Manifest

    def close(self) -> None:
        """Others may have the memory. Idempotent."""


# ---- files


class FileVersion(OpenVersion):
    """A version whose file this process has mapped; changes of ``memory`` are this process's own."""

    def __init__(self, path: Path, layout: VersionLayout) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            flags = mmap.MAP_PRIVATE
            self._map = mmap.mmap(fd, layout.nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        self.memory = memoryview(self._map)
        self.manifest = parse_manifest(self.memory[: layout.data])

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # somebody has tensors over it, and keeps it as long as these live
            self.memory.release()
            self._map.close()


class Files:
    """The versions in ``folder``, which is on this machine."""

    def __init__(self, folder: Path, layout: VersionLayout) -> None:
        self.folder, self._layout = folder, layout

    def open(self) -> FileVersion:
        """The newest version. Raises `RemoteAccessError` where there is none any more."""
        while True:
            try:
                return FileVersion((self.folder / CURRENT).resolve() / MODEL, self._layout)
            except FileNotFoundError:  # another version has taken its place meanwhile
                if not self.folder.is_dir():
                    raise RemoteAccessError(
                        "the optimizer that published these versions was closed, and they are gone"
                    ) from None


# ---- one-sided reads


class LeasedVersion(OpenVersion):
    """A version that is read from the publisher's memory, under a lease."""

    def __init__(self, leases: Leases, counter: int, buffer: int) -> None:
        self._leases, self.counter, self._buffer = leases, counter, buffer
        self._open = True
        try:
            self.manifest = parse_manifest(self._header())
        except BaseException:
            self.close()
            raise

    def _header(self) -> memoryview:
        header = self._leases.header
        self._leases.bring(self._buffer, self.counter, [ReadSpan(0, 0, header.nbytes)], header)
        self._check()
        return memoryview(header)

    def read(self, wanted: Sequence[tuple[Selection, Region]]) -> None:
        """Brings what is wanted into memory.

        Raises `VersionExpired`, and then what is there means nothing; or `PeerLost` or `WaitTimeout`.
        """
        for selection, region in wanted:
            self._leases.bring(self._buffer, self.counter, selection.spans, region)
        self._check()

    def _check(self) -> None:
        """Whether the buffer has not been filled anew since the lease was written."""
        if not holds(self._leases.look(), self._buffer, self.counter):
            raise VersionExpired(
                f"version {self.counter} was taken back, because this reader was silent for too long: read a newer one"
            )

    def close(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(DeviceError):
                self._leases.hold(0)


class Leases:
    """The versions of a store, read one-sidedly: from buffers that are mapped, or over a network.

    ``handover``: where this machine's processes get the buffers' descriptors. Raises `PeerLost`.
    """

    def __init__(self, member: Member, store: str, layout: VersionLayout, handover: str, timeout: float) -> None:
        self._timeout, self._layout = timeout, layout
        self._channel = member.channel(PUBLISHER)
        hello = msgspec.msgpack.encode(Hello(self._channel.device.name, socket.gethostname(), os.getpid()))
        opened = decode_message(ask_publisher(member, store, "hello", "opened", hello, timeout), Opened)
        self._board = RemoteRegion.unpack(opened.board)
        self._buffers = [RemoteRegion.unpack(each) for each in opened.buffers]
        self.device = self._channel.device.name
        self.maps = self._channel.device.capabilities.maps
        self._mapped = self._map(handover) if self.maps else []
        device = self._channel.device
        self._seen = device.allocate(self._board.length)
        self.header = device.allocate(layout.data)
        self._version = device.allocate(WORD)  # as it goes into the lease
        lease = RemoteRegion.unpack(opened.lease)
        source = [] if self.maps else [self._version.view()]
        self._lease = Producer(self._channel, lease.view(0, WORD), slots=[lease.view(WORD, WORD)], source=source)
        self._signs, self._signed, self._beat = 0, 0.0, member.client.welcome.beat
        self._rooms: dict[tuple[int, int], Region] = {}

    def _map(self, handover: str) -> list[Bytes]:
        descriptors = ask(handover, self._board.length // WORD - 1)
        try:
            files = [mapped(fd, self._layout.nbytes, writable=False) for fd in descriptors]
            return [np.frombuffer(file, np.uint8) for file in files]
        finally:
            for fd in descriptors:
                os.close(fd)

    def look(self) -> memoryview:
        """The board as it is now."""
        self._channel.read(self._seen.view(), self._board.view()).wait(self._timeout)
        return memoryview(self._seen)

    def newest(self) -> int:
        """The counter of the newest version; 0: there is none yet."""
        return read_board(self.look())[0]

    def open(self) -> LeasedVersion:
        """The newest version."""
        while True:
            counter, buffer = read_board(self.look())
            self.hold(counter)
            if read_board(self.look())[0] == counter:  # whoever wants to fill its buffer sees the lease
                return LeasedVersion(self, counter, buffer)

    def hold(self, counter: int) -> None:
        """This reader has, or still has, that version; 0: none. Returns when the publisher can see it."""
        self._signs += 1
        self._signed = time.monotonic()
        self._lease.slot(self._signs, self._timeout)[:] = counter.to_bytes(WORD, "little")
        self._lease.send(self._signs).wait(self._timeout)

    def bring(self, buffer: int, counter: int, spans: Sequence[ReadSpan], region: Region) -> None:
        """Reads spans of a buffer that has version ``counter``, with signs of life."""
        under_way: deque[Completion] = deque()
        memory = np.frombuffer(memoryview(region), np.uint8)
        for file, at, nbytes in _parts(spans):
            if self.maps:
                np.copyto(memory[at : at + nbytes], self._mapped[buffer][file : file + nbytes])
                counters.add(copies=1, copied_bytes=nbytes)
            else:
                if len(under_way) == _IN_FLIGHT:
                    under_way.popleft().wait(self._timeout)
                source = self._buffers[buffer].view(file, nbytes)
                under_way.append(self._channel.read(region.view(at, nbytes), source))
            if time.monotonic() - self._signed > self._beat:
                self.hold(counter)
        for read in under_way:
            read.wait(self._timeout)

    def room(self, buffer: Bytes) -> Region:
        """Registers memory that versions are read into again and again, once, and keeps it."""
        key = (buffer.ctypes.data, buffer.nbytes)
        if key not in self._rooms:
            self._rooms[key] = self.room_once(buffer)
        return self._rooms[key]

    def room_once(self, buffer: Bytes) -> Region:
        """Registers memory for one version; the caller closes it."""
        return self._channel.device.register(buffer)

    def close(self) -> None:
        """Idempotent."""
        for region in (self._seen, self.header, self._version, *self._rooms.values()):
            region.close()


def _parts(spans: Sequence[ReadSpan]) -> Iterator[ReadSpan]:
    for span in spans:
        for at in range(0, span.nbytes, _PART):
            yield ReadSpan(span.file + at, span.memory + at, min(_PART, span.nbytes - at))
