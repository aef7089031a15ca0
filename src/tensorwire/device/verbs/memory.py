"""Registered memory of a verbs device: allocated by it, lent to it, and exposed to peers.

- Memory that the device allocates lies in slabs, which are registered once.
- Memory lent to it is registered on first use. If an object is known to own its memory for exactly as long as it lives
  (a numpy array with memory of its own, a region), a bounded cache keeps the registration, which ends with the object.
  All other memory is registered only while some region of it lives.
- A region exposed to peers gets a registration of its own, over its bytes only, for each access.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tensorwire._native import Memory
from tensorwire.device.region import Access
from tensorwire.device.verbs.registrations import MR, Domain, Registrations, local_access, remote_access
from tensorwire.device.verbs.slabs import LARGEST_PIECE, SLAB, MemorySlab, new_memory, rounded
from tensorwire.errors import OutOfMemory

KEPT = 256  # registrations of memory that nothing uses now
KEPT_BYTES = 1 << 30

_Key = tuple[int, int, bool]  # address, bytes, writable


@dataclass(eq=False, slots=True)
class _Lent:
    """A registration of memory that others own. Its identity is its generation: another may come to the same key."""

    mr: MR
    nbytes: int
    regions: int = 0  # that use it now; while there are any, they keep the memory as it is
    owner: weakref.ref[Any] | None = None


class Registrar:
    """The registrations of one protection domain. Safe to use from several threads.

    ``kept``, ``kept_bytes``: how many registrations of memory that no region uses now, and of how many bytes in all,
    stay for later.
    """

    def __init__(self, domain: Domain, *, kept: int = KEPT, kept_bytes: int = KEPT_BYTES) -> None:
        self._registrations = Registrations(domain)
        self._bounds = kept, kept_bytes
        self._slabs: list[MemorySlab] = []
        self._used: dict[_Key, _Lent] = {}
        self._idle: OrderedDict[_Key, _Lent] = OrderedDict()  # the longest unused first
        self._spare: Memory | None = None
        self._lock = threading.Lock()
        self._ends: deque[Callable[[], None]] = deque()
        self._pid = os.getpid()

    def allocate(self, nbytes: int, reserve: bool = True) -> Memory:
        """Zeroed memory at the beginning of a page, which forked children do not get.

        ``reserve=False`` gets a mapping of its own; its pages exist all the same, since the NIC pins them. Raises
        `OutOfMemory`.
        """
        with self._alone():
            return self._allocate(nbytes, reserve)

    def cover(self, memory: Memory, buffer: object = None) -> MR:
        """A registration that covers ``memory``, for this process's own transfers; it lives as long as ``memory``.

        ``memory``: the very object whose lifetime says how long it is needed, such as the region. ``buffer``: what it
        was made of, if that is not the device's own memory. Raises `OutOfMemory`, or `ArgumentError` for memory that
        cannot be registered.
        """
        with self._alone():
            slab = self._slab_of(self._place_of(memory).address)
            return self._borrow(memory, buffer) if slab is None else slab.mr

    def expose(self, memory: Memory, access: Access) -> MR:
        """A registration of exactly these bytes for peers; of a byte of a page that nobody uses if there are none.

        ``memory`` must live until `withdraw`: the caller keeps it. Raises `OutOfMemory` or `ArgumentError`.
        """
        with self._alone():
            return self._pin(self._place_of(memory).address, memory.nbytes or 1, remote_access(access))

    def withdraw(self, mr: MR) -> None:
        """The NIC refuses peers from now on. Idempotent."""
        with self._alone():
            self._registrations.end(mr)

    def close(self) -> None:
        """Ends every registration; memory that something looks into stays. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._alone():
            self._registrations.close()
            self._slabs.clear()
            self._used.clear()
            self._idle.clear()
            self._spare = None

    # The ends of objects come in any thread, even in the middle of the code below: they are put down without a lock,
    # and handled by the thread that takes it next.

    def _when_gone(self, thing: object, call: Callable[[], None]) -> None:
        weakref.finalize(thing, self._end, call).atexit = False

    def _end(self, call: Callable[[], None]) -> None:
        if os.getpid() == self._pid:  # in a forked child nothing ends, and the lock may be held forever
            self._ends.append(call)
            self._settle()

    def _settle(self) -> None:
        while self._ends and self._lock.acquire(blocking=False):
            try:
                self._deal()
            finally:
                self._lock.release()

    def _deal(self) -> None:
        while self._ends:
            self._ends.popleft()()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            with self._lock:
                self._deal()
                yield
        finally:
            self._settle()

    def _pin(self, address: int, nbytes: int, access: int) -> MR:
        while True:
            try:
                return self._registrations.add(address, nbytes, access)
            except OutOfMemory:
                if not self._idle:
                    raise
                self._evict()

    # Slabs

    def _allocate(self, nbytes: int, reserve: bool) -> Memory:
        size = rounded(nbytes)
        if reserve and size <= LARGEST_PIECE:
            slab, offset = self._place(size)
        else:
            slab, offset = self._add(nbytes or 1, shared=False), 0
        piece = memoryview(slab.memory)[offset : offset + nbytes]
        self._when_gone(piece, functools.partial(self._release, slab, offset, size))
        memory = Memory.wrap(piece)
        memory.lies_in(slab.memory, offset)
        return memory

    def _place(self, size: int) -> tuple[MemorySlab, int]:
        for slab in self._slabs:
            offset = slab.acquire(size)
            if offset is not None:
                return slab, offset
        try:
            slab = self._add(SLAB, shared=True)
        except OutOfMemory:  # there may be enough for this one
            return self._add(size, shared=False), 0
        offset = slab.acquire(size)
        assert offset is not None
        return slab, offset

    def _add(self, nbytes: int, *, shared: bool) -> MemorySlab:
        memory = new_memory(nbytes)
        slab = MemorySlab(memory, self._pin(memory.address, nbytes, local_access()), shared=shared)
        self._slabs.append(slab)
        return slab

    def _release(self, slab: MemorySlab, offset: int, size: int) -> None:
        if slab not in self._slabs:  # closed
            return
        if slab.shared:
            slab.release(offset, size)
            if not slab.empty or sum(each.shared for each in self._slabs) == 1:
                return
        self._slabs.remove(slab)
        self._registrations.end(slab.mr)

    def _slab_of(self, address: int) -> MemorySlab | None:
        return next((slab for slab in self._slabs if slab.holds(address)), None)

    def _place_of(self, memory: Memory) -> Memory:
        if memory.nbytes:
            return memory
        if self._spare is None:  # NICs register no empty memory
            self._spare = self._allocate(1, True)
        return self._spare

    # What others own

    def _borrow(self, memory: Memory, buffer: object) -> MR:
        key = memory.address, memory.nbytes, memory.writable
        owner = owner_of(buffer)
        lent = self._used.get(key) or self._find_idle(key, owner)
        if lent is None:
            lent = _Lent(
                self._pin(memory.address, memory.nbytes, local_access(writable=memory.writable)), memory.nbytes
            )
        self._used[key] = lent
        lent.regions += 1
        self._when_gone(memory, functools.partial(self._leave, key, lent))
        if owner is not None and (lent.owner is None or lent.owner() is not owner):
            # No finalizer: it would outlive the registration.
            lent.owner = weakref.ref(owner, lambda _: self._end(functools.partial(self._orphan, key, lent)))
        return lent.mr

    def _find_idle(self, key: _Key, owner: object) -> _Lent | None:
        lent = self._idle.pop(key, None)
        if lent is None or (lent.owner is not None and owner is not None and lent.owner() is owner):
            return lent
        self._drop(lent)  # that memory was freed, and here is other memory at its address
        return None

    def _leave(self, key: _Key, lent: _Lent) -> None:
        lent.regions -= 1
        if lent.regions or self._used.get(key) is not lent:
            return
        del self._used[key]
        if lent.owner is None or lent.owner() is None:
            self._drop(lent)
            return
        self._idle[key] = lent
        kept, kept_bytes = self._bounds
        while len(self._idle) > kept or sum(each.nbytes for each in self._idle.values()) > kept_bytes:
            self._evict()

    def _orphan(self, key: _Key, lent: _Lent) -> None:
        if self._idle.get(key) is lent:
            del self._idle[key]
            self._drop(lent)

    def _evict(self) -> None:
        self._drop(self._idle.popitem(last=False)[1])

    def _drop(self, lent: _Lent) -> None:
        self._registrations.end(lent.mr)
        lent.owner = None  # numpy refuses to resize an array as long as anyone refers to it weakly


def owner_of(buffer: object) -> object | None:
    """The object that owns the memory of ``buffer`` for exactly as long as it lives; None if none is known to.

    A numpy array with memory of its own cannot be resized while there are weak references to it; an array that looks
    into another one keeps that one. Memory of our own is never moved. A bytearray, a mapping of a file, or a tensor of
    torch may get other memory in its liveness.
    """
    numpy = sys.modules.get("numpy")  # loading it takes long, and without it there are no arrays
    while True:
        if numpy is not None and isinstance(buffer, numpy.ndarray):
            if buffer.base is None:
                return buffer if buffer.flags.owndata else None
            buffer = buffer.base
        elif isinstance(buffer, memoryview):
            buffer = buffer.obj
        else:
            return buffer if isinstance(buffer, Memory) else None
