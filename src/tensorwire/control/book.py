"""The coordinator's memory: published entries, barriers, and plans to compare."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Coroutine
from typing import Any

from tensorwire.control import frames
from tensorwire.control.frames import Cause

_DIFF_LINES = 20


class Book:
    """Answers the requests of members. Lives in the coordinator's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, mismatch: Callable[[Cause], None]) -> None:
        self._mismatch = mismatch
        self._entries: dict[str, tuple[bytes, frozenset[str] | None]] = {}
        self._changed = asyncio.Condition()
        self._arrived: dict[str, set[str]] = {}
        self._plans: dict[str, dict[str, frames.Compare]] = {}
        self._cause: Cause | None = None
        self._ended = False
        self._loop = loop

    async def answer(
        self, member: str, message: frames.Publish | frames.Lookup | frames.Barrier | frames.Compare
    ) -> frames.Answer:
        """The answer to one request; errors are in it."""
        if isinstance(message, frames.Publish):
            return await self._publish(message)
        if isinstance(message, frames.Lookup):
            work, what = self._lookup(member, message), f"nobody published {message.key!r}"
        elif isinstance(message, frames.Barrier):
            work, what = self._barrier(member, message), f"barrier {message.name!r}"
        else:
            work, what = self._compare(member, message), f"the comparison of {message.name!r}"
        return await self._bounded(work, message.id, message.timeout, what, message)

    async def _bounded(
        self, work: Coroutine[Any, Any, frames.Answer], id: int, timeout: float, what: str, message: frames.Message
    ) -> frames.Answer:
        try:
            return await asyncio.wait_for(work, timeout)
        except asyncio.TimeoutError:
            if isinstance(message, (frames.Barrier, frames.Compare)):
                here = sorted(self._arrived.get(_key(message), set()))
                what += f": only {', '.join(here)} of {message.parties} came"
            return frames.Answer(id, error=f"{what} (waited {timeout:g} s)", type="WaitTimeout")

    async def _publish(self, message: frames.Publish) -> frames.Answer:
        if message.key in self._entries:
            return frames.Answer(message.id, error=f"{message.key!r} was published before", type="ProtocolError")
        self._entries[message.key] = (message.value, None if message.to is None else frozenset(message.to))
        await self._notify()
        return frames.Answer(message.id)

    async def _lookup(self, member: str, message: frames.Lookup) -> frames.Answer:
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended or message.key in self._entries)
        if message.key not in self._entries:
            return frames.Answer(message.id, error="the job ended", type="JobEnded")
        value, entitled = self._entries[message.key]
        if entitled is not None and member not in entitled:
            return frames.Answer(message.id, error=f"{message.key!r} is not for {member}", type="RemoteAccessError")
        return frames.Answer(message.id, value)

    async def _barrier(self, member: str, message: frames.Barrier) -> frames.Answer:
        return await self._meet(member, message, _key(message), message.parties)

    async def _compare(self, member: str, message: frames.Compare) -> frames.Answer:
        plans = self._plans.setdefault(message.name, {})
        plans[member] = message
        first_name, first = next(iter(plans.items()))
        if message.digest != first.digest:
            what = f"does not agree with {first_name} on {message.name}:\n{_diff(first_name, first, member, message)}"
            self._mismatch(Cause(member, what))
            return frames.Answer(message.id, error=f"{member} {what}", type="PlanMismatch")
        return await self._meet(member, message, _key(message), message.parties)

    async def _meet(self, member: str, message: frames.Barrier | frames.Compare, key: str, parties: int) -> frames.Answer:
        arrived = self._arrived.setdefault(key, set())
        arrived.add(member)
        await self._notify()
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended or len(arrived) >= parties)
        if len(arrived) < parties:
            return frames.Answer(message.id, error="the job ended", type="JobEnded")
        return frames.Answer(message.id)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def end(self, cause: Cause | None) -> None:
        """Answers whoever still waits."""
        self._ended = True
        self._cause = cause
        self._loop.create_task(self._notify())


def _key(message: frames.Barrier | frames.Compare) -> str:
    return f"{type(message).__name__}:{message.name}"


def _diff(a_name: str, a: frames.Compare, b_name: str, b: frames.Compare) -> str:
    lines = list(difflib.unified_diff(a.text.splitlines(), b.text.splitlines(), a_name, b_name, lineterm="", n=0))
    more = len(lines) - _DIFF_LINES
    return "\n".join(lines[:_DIFF_LINES]) + (f"\n... and {more} lines more" if more > 0 else "")
