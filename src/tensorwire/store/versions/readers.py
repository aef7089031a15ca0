"""The publisher's side of readers: those on other machines read its buffers one-sidedly.

A reader knows three regions: the *board*, which says which version is in which buffer; the buffers; and its own *lease*
here, which says which versions it has, and which it alone writes. It writes the lease, looks whether that version is
still the newest, reads, and looks whether the buffer still has it. Before a buffer is filled anew, another version is
the newest on the board, and only then are the leases looked at: a reader that came before has a lease that is seen
here, and one that comes after finds that there is a newer version. Then the board says that the buffer has no version:
a reader whose lease was revoked, because it had not changed for too long, sees that in the end, and throws away what it
has read.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tensorwire.control import Member
from tensorwire.device import Device, Region
from tensorwire.errors import TensorwireError
from tensorwire.store.versions.events import Events
from tensorwire.store.versions.listing import ReaderState, topic

WORD = 8


def lease_bytes(buffers: int) -> int:
    """A word that grows with every sign of life, and by buffer the version that the reader has there, 0 for none."""
    return WORD * (1 + buffers)


def board_word(counter: int, buffer: int) -> int:
    """The board's first word: the version that is published, and where it is."""
    return counter * 256 + buffer


def read_board(board: bytes) -> tuple[int, int]:
    """The version that is published, and its buffer; version 0: there is none."""
    counter, buffer = divmod(int(np.frombuffer(board, np.uint64, 1)[0]), 256)
    return counter, buffer


def holds(board: bytes, buffer: int, counter: int) -> bool:
    """Whether the buffer still has that version."""
    return int(np.frombuffer(board, np.uint64, 1, WORD * (1 + buffer))[0]) == counter


class Hello(msgspec.Struct, frozen=True):
    """A reader's first word: by which device it reads, or empty where it reads files; its machine, and its process
    there."""

    device: str
    machine: str
    process: int


class Opened(msgspec.Struct, frozen=True):
    """What a reader may read, and its lease: packed regions."""

    board: bytes
    buffers: list[bytes]
    lease: bytes


@dataclass
class _Reader:
    lease: Region | None  # None: it reads files
    state: ReaderState
    seen: int = 0
    since: float = field(default_factory=time.monotonic)


class Readers:
    """The readers of a store.

    ``buffers``: the memory of the snapshot buffers. A lease is revoked where it does not change for as long as a member
    may be silent.
    """

    def __init__(self, member: Member, store: str, buffers: list[memoryview], events: Events) -> None:
        self._member, self._store, self._memory, self._events = member, store, buffers, events
        self._silent = member.client.welcome.lost_after
        self._boards = _on_all(member.devices.values(), WORD * (1 + len(buffers)))
        self._buffers: dict[str, list[Region]] = {}  # by device, once somebody needs them
        self._readers: dict[str, _Reader] = {}  # by name
        self._lock = threading.Lock()
        member.client.answer(topic(store, "hello"), self._come)
        member.client.on_told(topic(store, "report"), self._note)
        self._forget_left = member.client.on_reader_left(self._drop)

    # ---- readers come and go; all of it in the control thread, so that whatever is wrong must not raise

    def _come(self, reader: str, word: bytes) -> bytes:
        """Opens to a reader what it needs. Nothing connects to it: it may be where nobody reaches it."""
        with contextlib.suppress(TensorwireError, msgspec.MsgspecError, KeyError):
            hello = msgspec.msgpack.decode(word, type=Hello)
            device = self._member.devices[hello.device] if hello.device else None
            lease = None if device is None else device.allocate(lease_bytes(len(self._memory)))
            with self._lock:
                state = ReaderState(reader, f"{hello.machine}, process {hello.process}")
                self._readers[reader] = _Reader(lease, state)
            self._events.add(f"{reader} came: {state.machine}")
            if device is None or lease is None:
                return b""
            buffers = [each.remote("read").pack() for each in self.buffers(device)]
            opened = Opened(self._boards[device.name].remote("read").pack(), buffers, lease.remote("write").pack())
            return msgspec.msgpack.encode(opened)
        return b""

    def buffers(self, device: Device) -> list[Region]:
        """The snapshot buffers, for peers over a network."""
        with self._lock:
            if device.name not in self._buffers:
                self._buffers[device.name] = [device.register(each) for each in self._memory]
            return self._buffers[device.name]

    def _note(self, reader: str, report: bytes) -> None:
        """What a reader runs now."""
        with contextlib.suppress(msgspec.MsgspecError, KeyError), self._lock:
            found = self._readers[reader]
            said = msgspec.msgpack.decode(report, type=ReaderState)
            found.state = msgspec.structs.replace(said, reader=reader, machine=found.state.machine)

    def _drop(self, reader: str) -> None:
        """A reader is gone, and holds nothing."""
        with self._lock:
            found = self._readers.pop(reader, None)
        if found is None:
            return
        self._events.add(f"{reader} left: {found.state.machine}")
        if found.lease is not None:
            found.lease.close()

    @property
    def states(self) -> list[ReaderState]:
        """What each reader runs."""
        with self._lock:
            return [each.state for each in self._readers.values()]

    # ---- versions

    def announce(self, counter: int, buffer: int) -> None:
        """Readers get this version from now on."""
        self._store_word(1 + buffer, counter)
        self._store_word(0, board_word(counter, buffer))

    def withdraw(self, buffer: int) -> None:
        """This buffer has no version any more: it is about to be filled."""
        self._store_word(1 + buffer, 0)

    def _store_word(self, at: int, value: int) -> None:
        board, *_ = self._boards.values()  # all are of the same memory
        board.store(WORD * at, value)
        board.fetch_add(WORD * at, 0)  # a full fence: what follows looks at leases

    def hold(self, buffer: int, counter: int) -> bool:
        """Whether a reader has a lease of that version in that buffer, and is not silent."""
        with self._lock:
            readers = list(self._readers.values())
        return any(each.lease is not None and self._is_held(each, each.lease, buffer, counter) for each in readers)

    def _is_held(self, reader: _Reader, lease: Region, buffer: int, counter: int) -> bool:
        sign = lease.load(0)
        if sign != reader.seen:
            reader.seen, reader.since = sign, time.monotonic()
        return lease.load(WORD * (1 + buffer)) == counter and time.monotonic() - reader.since < self._silent

    def close(self) -> None:
        """The store has ended."""
        for what in ("hello", "report"):
            self._member.client.on_told(topic(self._store, what), None)
        self._forget_left()
        with self._lock:
            readers, self._readers = self._readers, {}
        leases = [each.lease for each in readers.values() if each.lease is not None]
        for region in [*leases, *self._boards.values(), *(r for regions in self._buffers.values() for r in regions)]:
            region.close()


def _on_all(devices: Iterable[Device], nbytes: int) -> dict[str, Region]:
    """The same memory as a region of every device, by name; those that map memory make it."""
    first, *others = sorted(devices, key=lambda device: not device.capabilities.maps)
    region = first.allocate(nbytes)
    return {first.name: region, **{device.name: device.register(region) for device in others}}
