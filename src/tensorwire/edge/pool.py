"""A pool of registered memory for tensors of any size, without a registration per step.

A *lease* is a block of a *slab*, which is one region. Block sizes are four to a doubling, from 64 bytes on. Blocks of
up to a quarter of ``SLAB`` share slabs of that size, one block size per slab; larger ones have a slab each. A free slab
waits for any lease that it can serve (a large slab, for leases of half its size or more), and is closed after a number
of leases that it could not.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from tensorwire._native import Hold
from tensorwire.device import Device, Region
from tensorwire.device.region import Access
from tensorwire.errors import ArgumentError, OutOfMemory
from tensorwire.sizes import round_up

ALIGNMENT = 64
SLAB = 1 << 20  # bytes
IDLE_LEASES = 4096  # a slab that none of so many leases wanted is closed
_SHARED = SLAB // 4  # the largest block that shares a slab


def block_nbytes(nbytes: int) -> int:
    """Bytes of the block for a lease: at most a quarter more than was asked for, rounded up to 64."""
    step = max(ALIGNMENT, 1 << max(0, (max(nbytes, 1) - 1).bit_length() - 3))
    return round_up(max(nbytes, 1), step)


@dataclass(eq=False, slots=True)
class Slab:
    """A region cut into blocks of one size; ``fresh``: where blocks begin that nobody had yet."""

    device: Device
    region: Region
    nbytes: int
    block: int = 0
    fresh: int = 0
    used: int = 0
    returned: list[int] = field(default_factory=list)
    idle_since: int = 0
    _shown: dict[Access, bytes] = field(default_factory=dict)

    def shown(self, access: Access) -> bytes:
        """The packed capability for its region."""
        if access not in self._shown:
            self._shown[access] = self.region.remote(access).pack()
        return self._shown[access]

    def cut(self, block: int) -> None:
        """Begins anew, with blocks of that size."""
        self.block, self.fresh = block, 0
        self.returned.clear()

    @property
    def full(self) -> bool:
        """Whether no block is left."""
        return not self.returned and self.fresh + self.block > self.nbytes

    def take(self) -> int:
        """The offset of a block."""
        self.used += 1
        if self.returned:
            return self.returned.pop()
        self.fresh += self.block
        return self.fresh - self.block


class Borrower(Protocol):
    """Who lends leases to a peer: the sending end of an edge."""

    def collect(self) -> None:
        """Lets go of the leases that the peer is done with. Called in any thread."""


class Lease:
    """Memory of a pool, ``nbytes`` of it at a multiple of 64 bytes, not zeroed.

    It goes back by itself, once this object and everything that looks into the memory are gone, and no edge that it
    was sent over reads it any more: it may be released at any time.
    """

    __slots__ = ("_hold", "nbytes", "offset", "slab")

    def __init__(self, hold: Hold, slab: Slab, offset: int, nbytes: int) -> None:
        self._hold: Hold | None = hold
        self.slab, self.offset, self.nbytes = slab, offset, nbytes

    @property
    def memory(self) -> memoryview:
        """Its bytes, to be written before they are sent. Raises `ArgumentError` after ``release()``."""
        return memoryview(self.hold)

    @property
    def hold(self) -> Hold:
        """What keeps the memory, for its readers. Raises `ArgumentError` after ``release()``."""
        if self._hold is None:
            raise ArgumentError("this lease was released: take another one")
        return self._hold

    def release(self) -> None:
        """Releases the memory, which returns to the pool when nothing else refers to it. Idempotent."""
        self._hold = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Pool:
    """Registered memory, leased in blocks. Safe to use from several threads; leases may be dropped in any, at any time.

    Args:
        device: The device that registers the memory.
        limit: The most bytes of registered memory.

    Raises:
        ArgumentError: The limit is below 1.
    """

    def __init__(self, device: Device, *, limit: int) -> None:
        if limit < 1:
            raise ArgumentError(f"the limit of a pool must be 1 byte or more, not {limit}")
        self.device, self.limit = device, limit
        self._registered = self._leased = self._leases = 0
        self._open: dict[int, list[Slab]] = collections.defaultdict(list)  # with free blocks, by the size of a block
        self._idle: dict[int, collections.deque[Slab]] = collections.defaultdict(collections.deque)  # by their own
        self._returned: collections.deque[tuple[Slab, int]] = collections.deque()
        self._lock = threading.Lock()
        self._borrowers: list[Borrower] = []

    def lease(self, nbytes: int) -> Lease:
        """Takes a block of ``nbytes`` or more.

        Args:
            nbytes: The least size in bytes.

        Returns:
            The lease; its block is free again once it is released and nothing refers to its memory.

        Raises:
            ArgumentError: The size is negative.
            OutOfMemory: There would be more than the limit, or the machine has no more. Nothing has changed then.
        """
        if nbytes < 0:
            raise ArgumentError(f"the size of a lease must be 0 bytes or more, not {nbytes}")
        block = block_nbytes(nbytes)
        with self._lock:
            self._collect()
            slabs = self._open[block]
            if not slabs:
                slabs.append(self._find(block))
            slab = slabs[-1]
            offset = slab.take()
            if slab.full:
                slabs.pop()
            self._leased += slab.block
            self._leases += 1
            if self._leases % (IDLE_LEASES // 16) == 0:
                self._close_idle(self._leases - IDLE_LEASES)
        # The garbage collector may drop a lease while this thread holds the lock: what comes back waits in a queue.
        hold = Hold(slab.region, offset, nbytes, self._returned.append, (slab, offset))
        return Lease(hold, slab, offset, nbytes)

    @property
    def registered_bytes(self) -> int:
        """Bytes of all slabs."""
        with self._lock:
            self._collect()
            return self._registered

    @property
    def leased_bytes(self) -> int:
        """Bytes of all blocks that have not come back."""
        with self._lock:
            self._collect()
            return self._leased

    def trim(self) -> None:
        """Closes every slab that is free, such as before a long pause."""
        with self._lock:
            self._collect()
            self._close_idle(self._leases)

    def keep(self, borrower: Borrower) -> None:
        """Keeps a lender of leases as long as the pool, and asks it what came back before the pool grows.

        Args:
            borrower: What lends leases to a peer.
        """
        self._borrowers.append(borrower)

    def forget(self, borrower: Borrower) -> None:
        """Undoes ``keep``.

        Args:
            borrower: What was kept.
        """
        self._borrowers = [one for one in self._borrowers if one is not borrower]

    def _collect(self) -> None:
        while self._returned:
            slab, offset = self._returned.popleft()
            was_full = slab.full
            slab.returned.append(offset)
            slab.used -= 1
            self._leased -= slab.block
            if slab.used:
                if was_full:
                    self._open[slab.block].append(slab)
                continue
            if not was_full:
                self._open[slab.block].remove(slab)
            slab.idle_since = self._leases
            self._idle[slab.nbytes].append(slab)

    def _find(self, block: int) -> Slab:
        """A slab with a free block. Raises `OutOfMemory`."""
        slab = self._find_idle(block)
        if slab is None and self._borrowers:
            for borrower in self._borrowers:
                borrower.collect()
            self._collect()
            if self._open[block]:
                return self._open[block].pop()
            slab = self._find_idle(block)
        if slab is None:
            slab = self._grow(next(_serving(block)))
        slab.cut(block if slab.nbytes == SLAB else slab.nbytes)
        return slab

    def _find_idle(self, block: int) -> Slab | None:
        for nbytes in _serving(block):
            if self._idle[nbytes]:
                return self._idle[nbytes].pop()
        return None

    def _grow(self, nbytes: int) -> Slab:
        free = sum(slab.nbytes for slabs in self._idle.values() for slab in slabs)
        if self._registered - free + nbytes > self.limit:
            raise OutOfMemory(
                f"a pool of {self.limit} bytes has {self._registered - free} in use and no room for {nbytes} more: "
                "release tensors earlier, or raise its limit"
            )
        while self._registered + nbytes > self.limit:
            self._close(min((slabs for slabs in self._idle.values() if slabs), key=lambda slabs: slabs[0].idle_since))
        region = self.device.allocate(nbytes)
        self._registered += nbytes
        return Slab(self.device, region, nbytes)

    def _close_idle(self, since: int) -> None:
        """Closes the slabs that have been free since so many leases."""
        for slabs in self._idle.values():
            while slabs and slabs[0].idle_since <= since:
                self._close(slabs)

    def _close(self, slabs: collections.deque[Slab]) -> None:
        slab = slabs.popleft()
        self._registered -= slab.nbytes
        slab.region.close()


def _serving(block: int) -> Iterator[int]:
    """Bytes of the slabs that may serve such a block, best first."""
    if block <= _SHARED:
        yield SLAB
        return
    nbytes = block
    while nbytes <= 2 * block:
        yield nbytes
        nbytes = block_nbytes(nbytes + 1)
