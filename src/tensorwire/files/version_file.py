"""A file of a version, or of a part of one, such as a parameter."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorwire.files.held_versions import HeldVersion
from tensorwire.files.os_errors import as_os_errors
from tensorwire.files.positioned import Positioned

if TYPE_CHECKING:
    from tensorwire.files.tree import Status


class VersionFile(Positioned):
    """Bytes of one version, from `open` to `close`. `pread` may be called by several threads.

    Attributes:
        path (str): Its path in the job's folder, where it names this version for ever.
        folder (Folder | None): The folder that was connected for this file, and is closed with it.
    """

    def __init__(self, path: str, real: str, held: HeldVersion, head: bytes, start: int, status: Status) -> None:
        super().__init__(status.st_size)
        self.path, self._real = path, real
        self._held, self._head, self._start, self._status = held, np.frombuffer(head, np.uint8), start, status
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The path of the same file on this machine, for other programs.

        Raises:
            AttributeError: There is none: it is a part of a version, or of a job on another machine.
        """
        if not self._real:
            raise AttributeError(f"{self.path} is no file of this machine: read it here, or mount the job")
        return self._real

    def stat(self) -> Status:
        """Size, time and version."""
        return self._status

    def readable(self) -> bool:
        """True."""
        return True

    def _fill(self, memory: Any, offset: int) -> int:
        """Brings what there is from ``offset`` on into memory; how many bytes."""
        self._check_open()
        if offset < 0:
            raise ValueError(f"a negative offset, {offset}")
        nbytes: int = max(0, min(memory.nbytes, self._size - offset))
        head = self._head[offset : offset + nbytes]
        memory[: head.nbytes] = head
        if nbytes > head.nbytes:
            with as_os_errors(self.path):
                self._held.read(self._start + offset + head.nbytes - self._head.nbytes, memory[head.nbytes : nbytes])
        return nbytes

    def readinto(self, buffer: Any) -> int:
        """Fills memory from the present position on, without another copy.

        Args:
            buffer: Contiguous, writable memory, such as a numpy array.

        Returns:
            How many bytes were read: fewer than there is room for only at the end of the file.

        Raises:
            OSError: ``ESTALE``: this process was stopped for so long that it lost the version. ``ENODEV``: the job
                has ended, and the version was in another machine's memory.
        """
        memory = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
        with self._lock:
            nbytes = self._fill(memory, self._at)
            self._at += nbytes
        return nbytes

    def preadinto(self, buffer: Any, offset: int) -> int:
        """As `readinto`, from ``offset`` on; the position stays.

        Args:
            buffer: As for `readinto`.
            offset: Where to begin, in bytes.

        Returns:
            As `readinto`.
        """
        return self._fill(np.frombuffer(memoryview(buffer).cast("B"), np.uint8), offset)

    def pread(self, nbytes: int, offset: int) -> bytes:
        """Some bytes; the position stays.

        Args:
            nbytes: How many at most.
            offset: Where they begin.

        Returns:
            The bytes: fewer at the end of the file. Errors are those of `readinto`.
        """
        memory = np.empty(max(0, min(nbytes, self._size - offset)), np.uint8)
        return memory[: self.preadinto(memory, offset)].tobytes()

    def readall(self) -> bytes:
        """All bytes from the present position on."""
        return self.read(max(0, self._size - self._at)) or b""

    def close(self) -> None:
        """Lets the version go. Idempotent."""
        if not self.closed:
            super().close()
            self._held.close()
            self._disconnect()
