"""Whether the coordinator's own process was stalled, in which case silent members are not lost."""

from __future__ import annotations

import time

from tensorwire.control.frames import Cause

# Connections that members closed meanwhile, and exits that a launcher reports, are seen within so many seconds.
_AFTERMATH_SECONDS = 2.0


class Stall:
    """Watches the event loop of a coordinator, which is to `tick` every ``beat`` seconds.

    Members that receive nothing for ``lost_after`` seconds take the coordinator for gone and leave. When it goes on, it
    sees them leave, one after the other, and must blame none of them.
    """

    def __init__(self, who: str, beat: float, lost_after: float) -> None:
        self._who, self._beat, self._lost_after = who, beat, lost_after
        self._ticked = time.monotonic()
        self._seconds, self._until = 0.0, 0.0

    def tick(self) -> float:
        """The loop runs; for how many seconds it did not, if for more than a beat."""
        now = time.monotonic()
        silent, self._ticked = now - self._ticked, now
        if silent > self._lost_after:
            self._seconds, self._until = silent, now + self._beat + _AFTERMATH_SECONDS
        return silent - self._beat if silent > 2 * self._beat else 0.0

    def blame(self, cause: Cause) -> Cause:
        """``cause``, or this process itself, if it stood still and ``cause`` may be what came of that."""
        now = time.monotonic()
        silent = now - self._ticked  # it may not have come to its next tick
        seconds = silent if silent > self._lost_after else self._seconds if now < self._until else 0.0
        if not seconds:
            return cause
        return Cause(self._who, f"was stopped for {seconds:.0f} s: the processes of the job gave it up")
