"""Whether the garbage collector runs in this thread. Then the freeing code may have interrupted a transfer."""

from __future__ import annotations

import gc
import threading


class GarbageCollection:
    """Knows from the collector's own callbacks; without ``watch()`` there are none."""

    def __init__(self) -> None:
        self._thread = 0
        self._watched = False

    def watch(self) -> None:
        """From now on there is something that it may drop. Idempotent."""
        if not self._watched:
            self._watched = True
            gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        self._thread = threading.get_ident() if phase == "start" else 0

    def running(self) -> bool:
        """Whether it runs now in this thread."""
        return self._thread == threading.get_ident()


garbage_collection = GarbageCollection()
