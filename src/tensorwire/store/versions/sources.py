"""Where a reader gets versions from: as files on the machine that has them, elsewhere by one-sided reads."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tensorwire._native import copy_is_large, gather
from tensorwire.control import Member
from tensorwire.device import Completion, Region, RemoteRegion
from tensorwire.edge import Producer
from tensorwire.errors import DeviceError, RemoteAccessError, TensorwireError, VersionExpired
from tensorwire.messages import decode_message
from tensorwire.observe import counters
from tensorwire.store.versions.handover import PUBLISHER
from tensorwire.store.versions.listing import ask_publisher, topic
from tensorwire.store.versions.read_spans import ReadSpan, Selection
from tensorwire.store.versions.readers import WORD, Hello, Opened, holds, read_board
from tensorwire.store.versions.version_files import CURRENT, MODEL, map_version
from tensorwire.store.versions.version_layout import Manifest, VersionLayout, parse_manifest

_PART = 4 << 20  # bytes of one read
_IN_FLIGHT = 8  # reads
Bytes = npt.NDArray[np.uint8]  # one row


Wanted = Sequence[tuple[Selection, Bytes]]  # and the memory that it is read into


class OpenVersion(Protocol):
    """A version that a reader has, and that nobody overwrites, until ``close()``.

    ``data``: all that follows its header, where that is in this process's memory without being read.
    """

    manifest: Manifest
    data: Bytes | None

    def read(self, wanted: Wanted, *, keep: bool = True) -> None:
        """Brings what is wanted into memory; ``keep``: the same memory is used again and again.

        Raises `VersionExpired`, and then what is there means nothing; or `PeerLost` or `WaitTimeout`.
        """

    def close(self) -> None:
        """Others may have the memory. Idempotent."""


class Source(Protocol):
    """Versions of one store. ``device``: by which they are read."""

    device: str

    def newest(self) -> int:
        """The counter of the newest version; 0: there is none yet. Raises `RemoteAccessError` if the store is gone."""

    def kept(self) -> list[int]:
        """The counters of the versions that may be opened, the oldest first. Raises as ``newest``."""

    def open(self, counter: int | None = None) -> OpenVersion:
        """The version of that counter; None: the newest, which there is.

        Raises as ``newest``, or `FileNotFoundError` where that version is not kept.
        """

    def close(self) -> None:
        """Idempotent."""


# ---- files


class FileVersion(OpenVersion):
    """A version whose file this process has mapped; changes of ``data`` are this process's own.

    While it is mapped, the kernel keeps the servers from filling it: also while tensors over ``data`` live.
    """

    def __init__(self, path: Path, layout: VersionLayout) -> None:
        memory = map_version(path, layout.nbytes)
        self.manifest = parse_manifest(memory[: layout.data])
        self._file = np.frombuffer(memory, np.uint8)
        self.data = self._file[layout.data :]

    def read(self, wanted: Wanted, *, keep: bool = True) -> None:
        for selection, memory in wanted:
            large = copy_is_large(selection.nbytes)
            for file, at, nbytes in selection.spans:
                gather(memory[at : at + nbytes], self._file[file : file + nbytes], large)
                counters.add(copies=1, copied_bytes=nbytes)

    def close(self) -> None:
        self._file = self.data = np.empty(0, np.uint8)


class Files(Source):
    """The versions of ``store`` in ``folder``, which is on this machine."""

    device = "shm"

    def __init__(self, member: Member, store: str, folder: Path, layout: VersionLayout) -> None:
        self.folder, self._layout = folder, layout
        member.client.ask([PUBLISHER], topic(store, "hello"), _hello(""), 0.0)  # it need not wait for an answer

    def newest(self) -> int:
        try:
            return int((self.folder / CURRENT).readlink().name)
        except FileNotFoundError:
            self._check()
            return 0

    def kept(self) -> list[int]:
        self._check()
        return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdecimal())

    def open(self, counter: int | None = None) -> FileVersion:
        if counter is not None:
            return FileVersion(self.folder / str(counter) / MODEL, self._layout)
        while True:
            try:
                return FileVersion(self.folder / (self.folder / CURRENT).readlink() / MODEL, self._layout)
            except FileNotFoundError:  # another version has taken its place meanwhile
                self._check()

    def _check(self) -> None:
        if not self.folder.is_dir():
            raise RemoteAccessError(
                "the optimizer that published these versions was closed, and they are gone"
            ) from None

    def close(self) -> None:
        """Nothing is held."""


# ---- one-sided reads


class LeasedVersion(OpenVersion):
    """A version that is read from the publisher's memory, under a lease. Any thread may read."""

    data = None

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
        self._leases.bring(self._buffer, [ReadSpan(0, 0, header.nbytes)], header)
        self.check()
        return memoryview(header)

    def read(self, wanted: Wanted, *, keep: bool = True) -> None:
        with contextlib.ExitStack() as once:
            for selection, memory in wanted:
                room = self._leases.room(memory) if keep else once.enter_context(self._leases.room_once(memory))
                self._leases.bring(self._buffer, selection.spans, room)
        self.check()

    def check(self) -> None:
        """Raises `VersionExpired` where the buffer has been filled anew since the lease was written."""
        if not holds(self._leases.look(), self._buffer, self.counter):
            raise VersionExpired(
                f"version {self.counter} was taken back, because this reader was silent for too long: read a newer one"
            )

    def close(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(DeviceError):
                self._leases.let_go(self._buffer, self.counter)


class Leases(Source):
    """The versions of ``store``, read one-sidedly from the publisher's buffers. Raises `PeerLost`.

    ``patient``: versions may be held for long without being read; a thread then gives signs of life.
    """

    def __init__(
        self, member: Member, store: str, layout: VersionLayout, timeout: float, *, patient: bool = False
    ) -> None:
        self._timeout = timeout
        self._channel = member.channel(PUBLISHER)
        hello = _hello(self._channel.device.name)
        opened = decode_message(ask_publisher(member, store, "hello", hello, timeout), Opened)
        self._board = RemoteRegion.unpack(opened.board)
        self._buffers = [RemoteRegion.unpack(each) for each in opened.buffers]
        self.device = self._channel.device.name
        device = self._channel.device
        self._seen = device.allocate(self._board.length)
        self.header = device.allocate(layout.data)
        lease = RemoteRegion.unpack(opened.lease)
        nbytes = lease.length - WORD
        self._words = device.allocate(nbytes)  # by buffer: the version held there, as it goes into the lease
        self._lease = Producer(
            self._channel, lease.view(0, WORD), slots=[lease.view(WORD, nbytes)], source=[self._words.view()]
        )
        self._held: Counter[tuple[int, int]] = Counter()  # buffers, with the versions in them
        self._signs, self._signed, self._beat = 0, 0.0, member.client.welcome.beat
        self._rooms: dict[tuple[int, int], Region] = {}
        self._lock = threading.RLock()  # of all but reads
        self._closed = threading.Event()
        self._signing = threading.Thread(target=self._sign_on, name=f"lease of {store}", daemon=True)
        if patient:
            self._signing.start()

    def look(self) -> bytes:
        """The board as it is now."""
        with self._lock:
            self._channel.read(self._seen.view(), self._board.view()).wait(self._timeout)
            return bytes(self._seen)

    def newest(self) -> int:
        return read_board(self.look())[0]

    def kept(self) -> list[int]:
        return [counter] if (counter := self.newest()) else []

    def open(self, counter: int | None = None) -> LeasedVersion:
        while True:
            with self._lock:
                newest, buffer = read_board(self.look())
                if counter not in (None, newest):
                    raise FileNotFoundError(errno.ENOENT, f"version {counter} is not kept any more")
                self._held[buffer, newest] += 1
                self._sign()
                if read_board(self.look())[0] == newest:  # whoever wants to fill its buffer sees the lease
                    return LeasedVersion(self, newest, buffer)
                self.let_go(buffer, newest)

    def let_go(self, buffer: int, counter: int) -> None:
        """One that has opened that version is done with it."""
        with self._lock:
            self._held[buffer, counter] -= 1
            if not self._held[buffer, counter]:
                del self._held[buffer, counter]
                self._sign()

    def _sign(self) -> None:
        """This reader has, or still has, what it holds. Returns when the publisher can see it."""
        with self._lock:
            self._signs += 1
            self._signed = time.monotonic()
            words = np.frombuffer(self._lease.slot(self._signs, self._timeout), np.uint64)
            words[:] = 0
            for buffer, counter in self._held:
                words[buffer] = max(int(words[buffer]), counter)  # of an earlier one the lease was revoked
            self._lease.send(self._signs).wait(self._timeout)

    def _sign_if_due(self) -> None:
        if self._held and time.monotonic() - self._signed > self._beat:
            self._sign()

    def _sign_on(self) -> None:
        with contextlib.suppress(TensorwireError):  # who reads meets it, too
            while not self._closed.wait(self._beat):
                self._sign_if_due()

    def bring(self, buffer: int, spans: Sequence[ReadSpan], region: Region) -> None:
        """Reads spans of a buffer that is held, with signs of life."""
        under_way: deque[Completion] = deque()
        for file, at, nbytes in _parts(spans):
            if len(under_way) == _IN_FLIGHT:
                under_way.popleft().wait(self._timeout)
            source = self._buffers[buffer].view(file, nbytes)
            under_way.append(self._channel.read(region.view(at, nbytes), source))
            self._sign_if_due()
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
        self._closed.set()
        if self._signing.is_alive():
            self._signing.join()
        for region in (self._seen, self.header, self._words, *self._rooms.values()):
            region.close()


def _hello(device: str) -> bytes:
    return msgspec.msgpack.encode(Hello(device, socket.gethostname(), os.getpid()))


def _parts(spans: Sequence[ReadSpan]) -> Iterator[ReadSpan]:
    for span in spans:
        for at in range(0, span.nbytes, _PART):
            yield ReadSpan(span.file + at, span.memory + at, min(_PART, span.nbytes - at))
