"""A cpio archive in the kernel's format ("newc"), for the first file system of a guest.

Its layout: Documentation/driver-api/early-userspace/buffer-format.rst of the kernel.
"""

from __future__ import annotations

import stat


class Archive:
    """Collects folders and files; ``finish`` gives the bytes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._count = 0

    def folder(self, name: str) -> None:
        """An empty folder; it comes before what lies in it."""
        self._add(name, stat.S_IFDIR | 0o755, b"")

    def file(self, name: str, content: bytes, mode: int = 0o644) -> None:
        """A file with this content."""
        self._add(name, stat.S_IFREG | mode, content)

    def finish(self) -> bytes:
        """The archive."""
        self._add("TRAILER!!!", 0, b"")
        return b"".join(self._parts)

    def _add(self, name: str, mode: int, content: bytes) -> None:
        self._count += 1
        path = name.encode() + b"\0"
        # inode, mode, user, group, links, time, size, four device numbers, length of the name, check
        fields = (self._count, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
        for part in (head, content):
            self._parts.append(part + b"\0" * (-len(part) % 4))
