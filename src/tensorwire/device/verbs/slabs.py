"""Slabs: large mappings that are registered once and handed out in pieces, so that a region costs no registration.

A piece is a view of its slab. Views of the piece keep the piece, and the piece keeps the slab: it returns when no view
is left, in whatever order things are closed.
"""

from __future__ import annotations

import bisect
import ctypes

from tensorwire._native import PAGE, Memory
from tensorwire.device.verbs.registrations import MR
from tensorwire.errors import OutOfMemory
from tensorwire.sizes import round_up

SLAB = 16 << 20
LARGEST_PIECE = SLAB // 4  # larger ones would leave holes that fit nobody: they get a slab of their own


def rounded(nbytes: int) -> int:
    """Whole pages, at least one: no two pieces share a page, and an empty one has an address of its own."""
    return max(PAGE, round_up(nbytes, PAGE))


def new_memory(nbytes: int) -> Memory:
    """Zeroed memory that forked children do not get. Raises `OutOfMemory`.

    Its pages are touched at once, whatever the caller asked: registering pins them all.
    """
    try:
        memory = Memory.allocate(nbytes, True)
        memory.dont_fork()
    except OSError as error:
        raise OutOfMemory(f"cannot allocate a region of {nbytes} bytes: {error.args[1]}") from None
    return memory


class MemorySlab:
    """One registered mapping. ``shared``: it is for many pieces. Not safe to use from several threads."""

    def __init__(self, memory: Memory, mr: MR, *, shared: bool) -> None:
        self.memory = memory
        self.mr = mr
        self.shared = shared
        self._holes = [(0, memory.nbytes)] if shared else []  # (offset, bytes), by offset, never side by side
        self._used = 0  # up to here there may be what somebody wrote

    def acquire(self, nbytes: int) -> int | None:
        """The offset of a zeroed piece of so many bytes, whole pages; None if there is no room."""
        for i, (offset, length) in enumerate(self._holes):
            if length >= nbytes:
                self._holes[i : i + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []
                self._clear(offset, nbytes)
                return offset
        return None

    def _clear(self, offset: int, nbytes: int) -> None:
        if offset < self._used:
            ctypes.memset(self.memory.address + offset, 0, min(nbytes, self._used - offset))
        self._used = max(self._used, offset + nbytes)

    def release(self, offset: int, nbytes: int) -> None:
        """Takes a piece back; holes side by side become one."""
        i = bisect.bisect(self._holes, (offset, nbytes))
        end = offset + nbytes
        if i < len(self._holes) and self._holes[i][0] == end:
            end += self._holes.pop(i)[1]
        if i and sum(self._holes[i - 1]) == offset:
            i -= 1
            offset = self._holes.pop(i)[0]
        self._holes.insert(i, (offset, end - offset))

    @property
    def empty(self) -> bool:
        """Whether every piece came back."""
        return self._holes == [(0, self.memory.nbytes)]

    def holds(self, address: int) -> bool:
        """Whether that address of this process is in this slab."""
        return 0 <= address - self.memory.address < self.memory.nbytes
