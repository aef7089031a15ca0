"""What files that are read and files that push have in common: a size and a position."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorwire.files.folder import Folder


class Positioned(io.RawIOBase):
    """A file of ``size`` bytes. ``folder``: what was connected for it, and is closed with it."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0
        self.folder: Folder | None = None

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Sets the position.

        Args:
            offset: In bytes.
            whence: From the beginning, the position or the end of the file.

        Returns:
            The position.
        """
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}.get(whence)
        if base is None or base + offset < 0:
            raise ValueError(f"there is no position {offset} from {whence}")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """The position, in bytes."""
        return self._at

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on a closed file")

    def _disconnect(self) -> None:
        if self.folder is not None:
            self.folder.close()
