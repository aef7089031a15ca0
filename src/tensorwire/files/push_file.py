"""A file that pushes to a key when it was written: collects one push, and sends it once.

An open file takes the bytes of a key in any order and in pieces of any size. When all have come, `fsync` or `close`
sends them as one push, and the file is empty again. What cannot be right is refused, and nothing of it is applied.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tensorwire._native import copy_is_large, gather
from tensorwire.files.os_errors import as_os_errors
from tensorwire.files.positioned import Positioned
from tensorwire.store.writing import KeyWriter


class PushFile(Positioned):
    """What is written becomes a push to one key: its elements in C order, in the key's dtype.

    Attributes:
        name (str): The path in the job's folder.
        folder (Folder | None): The folder that was connected for this file, and is closed with it.
    """

    def __init__(self, name: str, writer: KeyWriter, dropped: Callable[[str], object]) -> None:
        super().__init__(len(writer.memory))
        self.name, self._writer, self._dropped = name, writer, dropped
        self._memory = np.frombuffer(writer.memory, np.uint8)
        self._refused = False
        self._here: list[tuple[int, int]] = []  # spans of bytes that have come
        self._lock = threading.RLock()

    def writable(self) -> bool:
        """True."""
        return True

    @property
    def complete(self) -> bool:
        """Whether all bytes of a push have come."""
        return self._here == [(0, self._memory.nbytes)]

    def pwrite(self, data: Any, offset: int) -> int:
        """Takes some bytes; the position stays.

        Args:
            data: Contiguous bytes, such as a numpy array.
            offset: Where they belong.

        Returns:
            How many were taken: all.

        Raises:
            OSError: ``EFBIG``: there is no such place in the key, and nothing that was written to this file becomes a
                push any more. ``EBUSY``: an earlier push was sent and not applied so far: `fsync` it first.
        """
        given = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        with self._lock:
            self._check_open()
            end, size = offset + given.nbytes, self._memory.nbytes
            if offset < 0 or end > size or self._refused:
                self._refused = True
                raise OSError(errno.EFBIG, f"the key has {size} bytes: a push of another size is refused", self.name)
            if self._writer.under_way:
                raise OSError(errno.EBUSY, "the push before was not applied yet: fsync first", self.name)
            if given.nbytes:
                gather(self._memory[offset:end], given, copy_is_large(size))
                self._here = _joined([*self._here, (offset, end)])
        return given.nbytes

    def write(self, data: Any) -> int:
        """As `pwrite`, at the present position, which moves on.

        Args:
            data: As for `pwrite`.

        Returns:
            How many bytes were taken.
        """
        with self._lock:
            nbytes = self.pwrite(data, self._at)
            self._at += nbytes
        return nbytes

    def fsync(self) -> None:
        """Returns when what was written was applied as one push, once. Of a file without bytes: at once.

        The file is then empty again, at its beginning. After an error call it again: no push is applied twice.

        Raises:
            OSError: ``EINVAL``: bytes are missing, or there were too many; nothing was applied. ``ETIMEDOUT``: a server
                did not answer. ``ENODEV``: the job has ended.
        """
        with self._lock:
            self._check_open()
            if self._refused:
                raise OSError(errno.EINVAL, "more was written than the key has: open it again", self.name)
            if not self._here:
                return
            if not self.complete:
                raise OSError(errno.EINVAL, f"this is no push: {self._missing()}", self.name)
            with as_os_errors(self.name):
                self._writer.push()
            self._here, self._at = [], 0

    def _missing(self) -> str:
        here = sum(stop - start for start, stop in self._here)
        return f"{here} of {self._memory.nbytes} bytes have come"

    def truncate(self, size: int | None = None) -> int:
        """What was written is dropped, where ``size`` is 0.

        Args:
            size: 0, or the size of the key, which changes nothing.

        Returns:
            The size.

        Raises:
            OSError: ``EINVAL``: another size.
        """
        with self._lock:
            self._check_open()
            if size == 0:
                if not self._writer.under_way:
                    self._here = []
            elif size != self._memory.nbytes:
                raise OSError(errno.EINVAL, f"the key has {self._memory.nbytes} bytes", self.name)
        return size

    def close(self) -> None:
        """Sends a push that is complete. Idempotent.

        Raises:
            OSError: As for `fsync`. What was incomplete is dropped, and the job's events say so.
        """
        with self._lock:
            if self.closed:
                return
            try:
                self.fsync()
            finally:
                self.drop()

    def drop(self) -> None:
        """Closes it without a push. Idempotent."""
        with self._lock:
            if self.closed:
                return
            super().close()
            try:
                if self._writer.under_way:
                    self._dropped(f"closed {self.name} while a push was under way: it may be applied")
                elif self._here or self._refused:
                    why = "too many bytes" if self._refused else self._missing()
                    self._dropped(f"dropped a push to {self.name}: {why}")
                self._writer.close()
            finally:
                self._disconnect()


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same, without what overlaps or touches."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
