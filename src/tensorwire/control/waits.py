"""Tells workers that wait which worker they wait for. It lives in the coordinator's event loop, without a thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet

from tensorwire.control import frames
from tensorwire.control.names import member_name
from tensorwire.sizes import listed

# A worker hears of a wait after so many seconds; then, in this wait or another one, after twice as many as before, so
# that waits which belong to every step of a job are not told in every step.
FIRST_SECONDS = 5.0
MOST_SECONDS = 60.0


class Waits:
    """``sizes``: how many members each role has. ``tell(member, text)`` sends a worker what it is to print. ``lost``:
    members for whom nobody waits; it may change."""

    def __init__(self, sizes: Mapping[str, int], tell: Callable[[str, str], None], lost: AbstractSet[str]) -> None:
        self._sizes, self._tell, self._lost = sizes, tell, lost
        self._pauses: dict[str, float] = {}
        self._steps: dict[str, tuple[frames.Waiting, asyncio.Task[None]]] = {}

    @contextlib.contextmanager
    def told(self, member: str, why: Callable[[], str]) -> Iterator[None]:
        """Inside it ``member`` waits; ``why()`` says for whom. Only workers are told: servers wait all the time."""
        if not member.startswith("worker"):
            yield
            return
        task = asyncio.get_running_loop().create_task(self._repeat(member, why, 0.0))
        try:
            yield
        finally:
            task.cancel()

    def step(self, member: str, message: frames.Waiting) -> None:
        """A worker waits in a step, or no longer; it says so only where that takes long."""
        _, task = self._steps.pop(member, (None, None))
        if task is not None:
            task.cancel()
        if message.place:

            def why() -> str:
                here = {name for name, (other, _) in self._steps.items() if other.place == message.place}
                return f"in {message.place} for {message.whom or self.missing('worker', here) or 'the servers'}"

            repeat = self._repeat(member, why, message.seconds)
            self._steps[member] = message, asyncio.get_running_loop().create_task(repeat)

    def missing(self, role: str, here: set[str]) -> str:
        """The members of a role that are not ``here``, in words; '' for none."""
        names = (member_name(role, i) for i in range(self._sizes.get(role, 0)))
        return listed([name for name in names if name not in here | self._lost])

    async def _repeat(self, member: str, why: Callable[[], str], waited: float) -> None:
        began = time.monotonic() - waited
        while True:
            pause = self._pauses.get(member, FIRST_SECONDS)
            await asyncio.sleep(pause)
            self._pauses[member] = min(2 * pause, MOST_SECONDS)
            self._tell(member, f"{member} has waited {time.monotonic() - began:.0f} s {why()}")


def awaited(key: str) -> str:
    """Whom a lookup of an entry waits for, in words."""
    who = next((part for part in key.split("/") if part.startswith(("worker ", "server "))), "")
    if key.startswith("card/"):
        return f"for {who} to join the job"
    return f"for {who or 'another process'} to publish {key!r}"
