"""Writes of async edges on devices to which only Python can post, such as verbs: one thread posts them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from tensorwire._native import PostQueue
from tensorwire.errors import PeerLost, RegionClosed

_LOOK = 1.0  # seconds between looks at whether this was closed

# `(signal, at, nbytes)`: writes so many bytes of the slots, and then the signal; with 0 bytes the signal alone.
WriteSlot = Callable[[int, int, int], object]


class AsyncPosts:
    """The thread of one device. ``queue``: where the ends put what is to be written."""

    def __init__(self) -> None:
        self.queue = PostQueue()
        self._lock = threading.Lock()
        self._writes: list[WriteSlot] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, write: WriteSlot) -> int:
        """The number by which an end's posts say that they are to be made by ``write``. Any thread may call it."""
        with self._lock:
            self._writes.append(write)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tensorwire async posts", daemon=True)
                self._thread.start()
            return len(self._writes) - 1

    def close(self) -> None:
        """What waits is made, and nothing more. Idempotent."""
        self._closed = True
        self.queue.close()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (found := self.queue.next(_LOOK)) is not None or not self._closed:
            if found is not None:
                number, signal, at, nbytes = found
                with contextlib.suppress(PeerLost, RegionClosed):  # whoever waits for the answer learns of it
                    self._writes[number](signal, at, nbytes)
