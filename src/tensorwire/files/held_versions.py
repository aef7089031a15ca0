"""Versions that files have open: each is mapped, or held by a lease, once, for all files of it.

Where a version is read over a network, small reads fetch whole blocks, and those of a program that reads on fetch the
next ones with them. Large reads go straight to their destination.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from tensorwire.launch.published import Published
from tensorwire.store.versions.read_spans import ReadSpan, Selection
from tensorwire.store.versions.sources import Bytes, OpenVersion
from tensorwire.store.versions.version_layout import Manifest

_BLOCK = 4 << 20  # bytes that are read at once at least
_BLOCKS = 16  # that are kept
_CAUSE_SECONDS = 1.0  # that the job's end may come after the end of its versions
_AHEAD = 4  # that are read at once where a program reads on


class HeldVersion:
    """One version; it does not change until the last file of it has let it go."""

    def __init__(self, versions: HeldVersions, opened: OpenVersion) -> None:
        self._versions, self._opened = versions, opened
        self.files = 0

    @property
    def manifest(self) -> Manifest:
        """What it says of itself."""
        return self._opened.manifest

    def read(self, start: int, memory: Bytes) -> None:
        """Brings the bytes of its file from ``start`` on into memory. Any thread may call it.

        Raises `VersionExpired`, `PeerLost`, `WaitTimeout`, or why the job ended.
        """
        member = self._versions.published.member
        with member.explained(_CAUSE_SECONDS):
            if self._opened.data is None and member.client.ended.is_set():
                raise member.client.error()  # also of what is here: who reads is not to depend on that
            if self._opened.data is not None or memory.nbytes >= _BLOCK:
                self.fetch([ReadSpan(start, 0, memory.nbytes)], memory)
            else:
                self._versions.blocks.read(self, start, memory)

    def fetch(self, spans: Sequence[ReadSpan], memory: Bytes, *, keep: bool = False) -> None:
        """Reads straight from where it is. ``keep``: this memory is used again and again."""
        self._opened.read([(Selection({}, tuple(spans), memory.nbytes), memory)], keep=keep)

    def close(self) -> None:
        """One file less has it."""
        self._versions.let_go(self)

    def end(self) -> None:
        """Others may have its memory."""
        self._opened.close()


class HeldVersions:
    """The versions of ``published`` that files have."""

    def __init__(self, published: Published) -> None:
        self.published = published
        self.blocks = _Blocks(published.layout.nbytes)
        self._held: dict[int, HeldVersion] = {}
        self._lock = threading.Lock()

    def newest(self) -> int:
        """The counter of the newest version; 0: there is none yet."""
        with self.published.member.explained(_CAUSE_SECONDS):
            return self.published.source.newest()

    def kept(self) -> list[int]:
        """The counters of those that may be opened, the oldest first."""
        with self.published.member.explained(_CAUSE_SECONDS):
            kept = self.published.source.kept()
        with self._lock:
            return sorted({*kept, *self._held})

    def hold(self, counter: int) -> HeldVersion:
        """That version, for one more file. Raises `FileNotFoundError` where it is not kept."""
        with self._lock:
            held = self._held.get(counter)
            if held is None:
                with self.published.member.explained(_CAUSE_SECONDS):
                    held = HeldVersion(self, self.published.source.open(counter))
                if held.manifest.counter != counter:  # its name had led to the file, where another version is by now
                    held.end()
                    raise FileNotFoundError(errno.ENOENT, f"version {counter} is not kept any more")
                self._held[counter] = held
            held.files += 1
            return held

    def let_go(self, held: HeldVersion) -> None:
        """One file less has it."""
        with self._lock:
            held.files -= 1
            if not held.files:
                del self._held[held.manifest.counter]
                held.end()
                self.blocks.forget(held)


class _Blocks:
    """The last blocks of versions, of ``nbytes`` each, that were read over a network."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._memory = np.empty(0, np.uint8)
        self._where: OrderedDict[tuple[HeldVersion, int], int] = OrderedDict()  # the last used one last
        self._free = list(range(_BLOCKS))
        self._last: tuple[HeldVersion, int] | None = None
        self._lock = threading.Lock()

    def read(self, held: HeldVersion, start: int, memory: Bytes) -> None:
        """As `HeldVersion.read`, by way of blocks."""
        done = 0
        while done < memory.nbytes:
            block, at = divmod(start + done, _BLOCK)
            nbytes = min(memory.nbytes - done, _BLOCK - at)
            with self._lock:
                place = self._find(held, block) * _BLOCK
                memory[done : done + nbytes] = self._memory[place + at : place + at + nbytes]
                self._last = held, block
            done += nbytes

    def _find(self, held: HeldVersion, block: int) -> int:
        if (held, block) not in self._where:
            reads_on = block == 0 or self._last == (held, block - 1)
            most = min(block + (_AHEAD if reads_on else 1), -(-self._nbytes // _BLOCK))
            self._fetch(held, [number for number in range(block, most) if (held, number) not in self._where])
        self._where.move_to_end((held, block))
        return self._where[held, block]

    def _fetch(self, held: HeldVersion, blocks: Sequence[int]) -> None:
        if not self._memory.nbytes:
            self._memory = np.empty(_BLOCKS * _BLOCK, np.uint8)
        while len(self._free) < len(blocks):
            self._free.append(self._where.popitem(last=False)[1])
        places = self._free[: len(blocks)]
        spans = [
            ReadSpan(block * _BLOCK, place * _BLOCK, min(_BLOCK, self._nbytes - block * _BLOCK))
            for block, place in zip(blocks, places, strict=True)
        ]
        held.fetch(spans, self._memory, keep=True)
        del self._free[: len(blocks)]
        self._where.update(((held, block), place) for block, place in zip(blocks, places, strict=True))

    def forget(self, held: HeldVersion) -> None:
        """Nobody reads that version any more."""
        with self._lock:
            for key in [key for key in self._where if key[0] is held]:
                self._free.append(self._where.pop(key))
            self._last = None
