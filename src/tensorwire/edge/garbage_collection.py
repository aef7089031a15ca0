"""Whether the garbage collector runs: what it drops may have interrupted the sending of something."""

from __future__ import annotations

import gc


class GarbageCollection:
    """Knows from the collector's own callbacks; without ``watch()`` there are none."""

    def __init__(self) -> None:
        self._running = self._watched = False

    def watch(self) -> None:
        """From now on there is something that it may drop. Idempotent."""
        if not self._watched:
            self._watched = True
            gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        self._running = phase == "start"

    def running(self) -> bool:
        """Whether it runs now, in any thread."""
        return self._running


garbage_collection = GarbageCollection()
