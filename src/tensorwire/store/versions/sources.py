"""Where a reader gets versions from: their files, on the machine that has them, or one-sided reads from elsewhere."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tensorwire.control import Member
from tensorwire.device import Completion, Region, RemoteRegion
from tensorwire.edge import Producer
from tensorwire.errors import DeviceError, PeerLost, RemoteAccessError, VersionExpired
from tensorwire.messages import decode_message
from tensorwire.observe import counters
from tensorwire.store.versions.handover import PUBLISHER
from tensorwire.store.versions.readers import WORD, Opened, holds, read_board, topic
from tensorwire.store.versions.selection import ReadSpan, Selection
from tensorwire.store.versions.version_files import CURRENT, MODEL
from tensorwire.store.versions.version_layout import Manifest, VersionLayout, parse_manifest

_PART = 4 << 20  # bytes of one read
_IN_FLIGHT = 8  # reads
Bytes = npt.NDArray[np.uint8]  # one row


class Room(Protocol):
    """Memory that versions are read into."""

    memory: memoryview


class OpenVersion(Protocol):
    """A version that a reader has, and that nobody overwrites, until ``close()``."""

    manifest: Manifest

    def read(self, wanted: Sequence[tuple[Selection, Room]]) -> None:
        """Brings what is wanted into memory. Raises `VersionExpired`, or `PeerLost` or `WaitTimeout`."""

    def close(self) -> None:
        """Others may have the memory. Idempotent."""


class Source(Protocol):
    """The versions of one store."""

    def newest(self) -> int:
        """The counter of the newest version; 0: there is none yet."""

    def open(self) -> OpenVersion:
        """The newest version."""

    def room(self, buffer: Bytes) -> Room:
        """Makes memory known that versions are to be read into."""

    def close(self) -> None:
        """Idempotent."""


# ---- files


class _Plain(Room):
    def __init__(self, buffer: Bytes) -> None:
        self.memory = buffer.data


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

    def read(self, wanted: Sequence[tuple[Selection, Room]]) -> None:
        for selection, room in wanted:
            for span in selection.spans:
                source = np.frombuffer(self.memory, np.uint8, span.nbytes, span.file)
                np.copyto(np.frombuffer(room.memory, np.uint8, span.nbytes, span.memory), source)
                counters.add(copies=1, copied_bytes=span.nbytes)

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # somebody has tensors over it, and keeps it as long as these live
            self.memory.release()
            self._map.close()


class Files(Source):
    """The versions in ``folder``, which is on this machine."""

    def __init__(self, folder: Path, layout: VersionLayout) -> None:
        self.folder, self._layout = folder, layout

    def newest(self) -> int:
        try:
            return int((self.folder / CURRENT).readlink().name)
        except FileNotFoundError:
            self._check()
            return 0

    def _check(self) -> None:
        if not self.folder.is_dir():
            raise RemoteAccessError("the optimizer that published these versions was closed, and they are gone")

    def open(self) -> FileVersion:
        while True:
            try:
                return FileVersion((self.folder / CURRENT).resolve() / MODEL, self._layout)
            except FileNotFoundError:  # another version has taken its place meanwhile
                self._check()

    def room(self, buffer: Bytes) -> Room:
        return _Plain(buffer)

    def close(self) -> None:
        pass


# ---- one-sided reads


class _Registered(Room):
    def __init__(self, region: Region) -> None:
        self.region = region
        self.memory = memoryview(region)


class RemoteVersion(OpenVersion):
    """A version that is read from the publisher's memory, under a lease."""

    def __init__(self, remote: Remote, counter: int, buffer: int) -> None:
        self._remote, self.counter, self._buffer = remote, counter, buffer
        self._open = True
        try:
            data = remote.layout.data
            self._read([ReadSpan(0, 0, data)], remote.header)
            self.check()
            self.manifest = parse_manifest(memoryview(remote.header)[:data])
        except BaseException:
            self.close()
            raise

    def read(self, wanted: Sequence[tuple[Selection, Room]]) -> None:
        for selection, room in wanted:
            assert isinstance(room, _Registered)
            self._read(selection.spans, room.region)
        self.check()

    def _read(self, spans: Sequence[ReadSpan], region: Region) -> None:
        remote, source = self._remote, self._remote.buffers[self._buffer]
        under_way: deque[Completion] = deque()
        for span in _parts(spans):
            if len(under_way) == _IN_FLIGHT:
                under_way.popleft().wait(remote.timeout)
                remote.live(self.counter)
            read = remote.channel.read(region.view(span.memory, span.nbytes), source.view(span.file, span.nbytes))
            under_way.append(read)
        for read in under_way:
            read.wait(remote.timeout)

    def check(self) -> None:
        """Raises `VersionExpired` where the buffer may have been filled anew since the lease was written."""
        if not holds(self._remote.look(), self._buffer, self.counter):
            raise VersionExpired(
                f"version {self.counter} was taken back, because this reader was silent for too long: read a newer one"
            )

    def close(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(DeviceError):
                self._remote.hold(0)


class Remote(Source):
    """The versions of a store whose publisher another machine has. Raises `WaitTimeout` or `PeerLost`."""

    def __init__(self, member: Member, store: str, layout: VersionLayout, timeout: float) -> None:
        self.layout, self.timeout = layout, timeout
        self.channel = member.channel(PUBLISHER)
        opened = _greet(member, store, timeout)
        target = RemoteRegion.unpack(opened.lease)
        self._board = RemoteRegion.unpack(opened.board)
        self.buffers = [RemoteRegion.unpack(each) for each in opened.buffers]
        device = self.channel.device
        self._seen = device.allocate(self._board.length)
        self.header = device.allocate(layout.data)
        self._version = device.allocate(WORD)  # as it goes into the lease
        self._lease = Producer(
            self.channel, target.view(0, WORD), slots=[target.view(WORD, WORD)], source=[self._version.view()]
        )
        self._signs, self._signed, self._beat = 0, 0.0, member.client.welcome.beat
        self._rooms: dict[tuple[int, int], _Registered] = {}

    def look(self) -> memoryview:
        """The board as it is now."""
        self.channel.read(self._seen.view(), self._board.view()).wait(self.timeout)
        return memoryview(self._seen)

    def newest(self) -> int:
        return read_board(self.look())[0]

    def open(self) -> RemoteVersion:
        while True:
            counter, buffer = read_board(self.look())
            self.hold(counter)
            if read_board(self.look())[0] == counter:  # whoever wants to fill its buffer sees the lease
                return RemoteVersion(self, counter, buffer)

    def hold(self, counter: int) -> None:
        """This reader has, or still has, that version; 0: none. Returns when the publisher can see it."""
        self._signs += 1
        self._signed = time.monotonic()
        self._lease.slot(self._signs, self.timeout)[:] = counter.to_bytes(WORD, "little")
        self._lease.send(self._signs).wait(self.timeout)

    def live(self, counter: int) -> None:
        """The same, if it has not been said for a while."""
        if time.monotonic() - self._signed > self._beat:
            self.hold(counter)

    def room(self, buffer: Bytes) -> Room:
        key = (buffer.ctypes.data, buffer.nbytes)
        if key not in self._rooms:
            self._rooms[key] = _Registered(self.channel.device.register(buffer))
        return self._rooms[key]

    def close(self) -> None:
        for region in (self._seen, self.header, self._version, *(room.region for room in self._rooms.values())):
            region.close()


def _greet(member: Member, store: str, timeout: float) -> Opened:
    """What the publisher opens to this reader. Raises `PeerLost` where it does not answer."""
    answers: SimpleQueue[bytes] = SimpleQueue()
    member.client.on_told(topic(store, "opened"), lambda _, value: answers.put(value))
    member.client.tell(PUBLISHER, topic(store, "hello"), b"")
    try:
        return decode_message(answers.get(timeout=timeout), Opened)
    except Empty:
        member.check()
        raise PeerLost(
            f"{PUBLISHER} did not open its versions to this reader within {timeout:g} s: neither can this process map "
            "its files, nor does a network device reach it"
        ) from None


def _parts(spans: Sequence[ReadSpan]) -> Iterator[ReadSpan]:
    for span in spans:
        for at in range(0, span.nbytes, _PART):
            yield ReadSpan(span.file + at, span.memory + at, min(_PART, span.nbytes - at))
