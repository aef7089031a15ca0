"""The coordinator's state: published entries, and which member waits for which."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec

from tensorwire.control import frames
from tensorwire.control.diff import differing_lines
from tensorwire.control.frames import Answer, Cause
from tensorwire.control.names import READER, member_name
from tensorwire.control.waits import Waits, awaited

# A worker that left while others wait for it may have failed, and how its process ended says more.
LEFT_SECONDS = 3.0


@dataclass
class _Entry:
    owner: str
    to: frozenset[str] | None
    total: int
    parts: list[bytes] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return len(self.parts) == self.total


@dataclass
class _Meeting:
    """Members that wait for each other; all of one role."""

    what: str
    parties: int
    arrived: set[str] = field(default_factory=set)
    plans: dict[str, frames.Compare] = field(default_factory=dict)
    gathers: dict[str, frames.Gather] = field(default_factory=dict)
    mismatch: str = ""
    refusal: str = ""

    def complete(self, lost: Collection[str]) -> bool:
        """Whether all have come but those ``lost``."""
        role = min(self.arrived, default="?").split()[0]
        missed = [name for name in lost if name.split()[0] == role and name not in self.arrived]
        return len(self.arrived) + len(missed) >= self.parties

    def over(self, lost: Collection[str]) -> bool:
        """Whether there is an answer."""
        return bool(self.mismatch or self.refusal) or self.complete(lost)


class Book:
    """Answers the requests of members. Lives in the coordinator's event loop.

    ``sizes``: how many members each role has. ``fail`` ends the job with a cause. ``tell`` is that of `Waits`.
    ``survives``: the job may go on without some, and others join it.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        fail: Callable[[Cause], None],
        tell: Callable[[str, str], None],
        *,
        survives: bool = False,
    ) -> None:
        self._survives = survives
        self._lost: set[str] = set()
        self.waits = Waits(sizes, tell, self._lost)
        self._sizes = sizes
        self._fail = fail
        self._entries: dict[str, _Entry] = {}
        self._meetings: dict[str, _Meeting] = {}
        self._forgotten: dict[str, set[str]] = {}  # by key: the servers that need it no more
        self._left: set[str] = set()
        self._first_lost = ""
        self._over: set[str] = set()  # by key: what they agreed on is done
        self._agreed: dict[str, tuple[str, frames.Compare]] = {}  # by key: what all have shown, and who was one of them
        self._changed = asyncio.Condition()
        self._ended = False

    async def answer(self, member: str, message: frames.Question) -> Answer:
        """The answer to one request; errors are in it."""
        if isinstance(message, frames.Publish):
            return await self._publish(member, message)
        if member.startswith(READER) and not isinstance(message, frames.Lookup):
            return Answer(message.id, error="readers meet nobody", type="ProtocolError")
        with self.waits.told(member, partial(self._awaited, member, message)):
            if not isinstance(message, frames.Lookup):
                return await self._meet(member, message)
            try:
                return await asyncio.wait_for(self._lookup(member, message), message.timeout)
            except asyncio.TimeoutError:
                why = f"nobody published {message.key!r} (waited {message.timeout:g} s)"
                return Answer(message.id, error=why, type="WaitTimeout")

    def _awaited(self, member: str, message: frames.Lookup | frames.Gather | frames.Compare) -> str:
        """Where ``member`` waits, and for whom."""
        if isinstance(message, frames.Lookup):
            return awaited(message.key)
        meeting = self._meetings.get(_key(member, message))
        if meeting is None:
            return "for the coordinator"
        return f"in {meeting.what} for {self.waits.missing(member.split()[0], meeting.arrived) or 'the others'}"

    # ---- the address book

    async def _publish(self, member: str, message: frames.Publish) -> Answer:
        to = None if message.to is None else frozenset(message.to)
        entry = self._entries.setdefault(message.key, _Entry(member, to, message.parts))
        if entry.owner != member or message.part != len(entry.parts) or entry.whole:
            return Answer(message.id, error=f"{message.key!r} was published before", type="AlreadyPublished")
        if message.parts != entry.total or entry.total > frames.MOST_PARTS:
            return Answer(message.id, error=f"{message.key!r} has a wrong number of parts", type="ProtocolError")
        entry.parts.append(message.value)
        if entry.whole:
            await self._notify()
        return Answer(message.id)

    async def _lookup(self, member: str, message: frames.Lookup) -> Answer:
        def found() -> _Entry | None:
            entry = self._entries.get(message.key)
            return entry if entry is not None and entry.whole else None

        def forgotten() -> bool:
            return any(member in self._forgotten.get(top, ()) for top in _tops(message.key))

        async with self._changed:
            await self._changed.wait_for(lambda: self._ended or found() or forgotten() or message.owner in self._lost)
        entry = found()
        if entry is None:
            if message.owner in self._lost:
                return Answer(message.id, error=f"{message.owner} is lost", type="PeerLost")
            if not self._ended:
                return Answer(message.id, error=f"{message.key!r} is over", type="RemoteAccessError")
            return Answer(message.id, error="the job ended", type="JobEnded")
        if entry.to is not None and member not in entry.to:
            return Answer(message.id, error=f"{message.key!r} is not for {member}", type="RemoteAccessError")
        if message.owner not in (None, entry.owner, entry.owner.split()[0]):
            why = f"{message.key!r} was published by {entry.owner}, which only {message.owner} may do"
            return Answer(message.id, error=why, type="RemoteAccessError")
        if message.part >= entry.total:
            return Answer(message.id, error=f"{message.key!r} has {entry.total} parts", type="ProtocolError")
        return Answer(message.id, entry.parts[message.part], entry.total)

    async def forget(self, member: str, key: str) -> None:
        """A server needs ``key``, and what is below it, no more. When all say so, it is gone."""
        servers = {member_name("server", i) for i in range(self._sizes.get("server", 0))}
        self._forgotten.setdefault(key, set()).update({member} & servers)
        await self._notify()
        if self._forgotten[key] == servers:
            self._entries = {k: entry for k, entry in self._entries.items() if key not in _tops(k)}
            if self._agreed.pop(f"Compare/worker/{key}", None) is not None:
                self._over.add(f"Compare/worker/{key}")

    async def drop(self, member: str) -> None:
        """A reader is gone, and with it what it published."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry.owner != member}

    # ---- meetings

    async def _meet(self, member: str, message: frames.Gather | frames.Compare) -> Answer:
        """Answers when all have come, or when it is clear that they do not do the same."""
        key = _key(member, message)
        if key in self._over:
            return Answer(message.id, error=f"{member} came too late: the others have finished", type="JobEnded")
        if key in self._agreed and isinstance(message, frames.Compare):
            return self._agree_late(member, message, *self._agreed[key])
        what = message.call if isinstance(message, frames.Gather) else f"the comparison of {message.name!r}"
        if isinstance(message, frames.Gather) and member.startswith("worker") and self._first_lost:
            return Answer(message.id, error=self._refused(what), type="Unsupported")
        meeting = self._meetings.setdefault(key, _Meeting(what, message.parties))
        if meeting.parties != message.parties:
            why = f"{what} is one of {meeting.parties}, not of {message.parties}, members"
            return Answer(message.id, error=why, type="ProtocolError")
        if isinstance(message, frames.Compare):
            mismatch = _mismatch(meeting, member, message)
            if mismatch is not None:
                self._fail(mismatch)
                return Answer(message.id, error=str(mismatch), type="PlanMismatch")
        else:
            nbytes = len(message.value) + sum(len(m.value) for who, m in meeting.gathers.items() if who != member)
            if nbytes > frames.GATHERED_BYTES:
                return Answer(message.id, error=f"{what}: {nbytes} bytes are too many", type="ProtocolError")
            meeting.gathers[member] = message
        meeting.arrived.add(member)
        meeting.mismatch = meeting.mismatch or _different_calls(meeting)
        if meeting.complete(self._lost):
            self._end_meeting(key)  # the next one to come to that name starts another meeting
        if meeting.over(self._lost):
            await self._notify()
        else:
            self._check(meeting)

            def met() -> bool:
                return self._ended or meeting.over(self._lost)

            try:
                await asyncio.wait_for(self._until(met), message.timeout)
            except asyncio.TimeoutError:
                if not met():
                    came = ", ".join(sorted(meeting.arrived))
                    meeting.gathers.pop(member, None)
                    meeting.arrived.discard(member)
                    why = f"{what}: only {came} of {meeting.parties} came (waited {message.timeout:g} s)"
                    return Answer(message.id, error=why, type="WaitTimeout")
        return self._gathered(meeting, message.id)

    def _end_meeting(self, key: str) -> None:
        meeting = self._meetings.pop(key)
        if self._survives and meeting.plans and not meeting.mismatch:  # one who joins later has to agree, too
            self._agreed[key] = next(iter(meeting.plans.items()))

    def _agree_late(self, member: str, message: frames.Compare, first: str, agreed: frames.Compare) -> Answer:
        """One who joins a job shows what the others agreed on. They go on if it does not."""
        mismatch = _difference(first, agreed, member, message)
        if mismatch is None:
            return Answer(message.id, frames.LATE)
        return Answer(message.id, error=str(mismatch), type="PlanMismatch")

    @property
    def has_begun(self) -> bool:
        """Whether all workers have agreed on something, in a job that may go on without some."""
        return bool(self._agreed or self._over)

    def _refused(self, what: str) -> str:
        """The members' values are no answer without those of a worker that was lost."""
        return f"{what} needs all workers that the job began with, and {self._first_lost} was lost"

    async def _until(self, met: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(met)

    def _gathered(self, meeting: _Meeting, id: int) -> Answer:
        """The values, in the order of the members' indices."""
        if meeting.mismatch:
            return Answer(id, error=meeting.mismatch, type="PlanMismatch")
        if meeting.refusal:
            return Answer(id, error=meeting.refusal, type="Unsupported")
        if not meeting.complete(self._lost):
            return Answer(id, error="the job ended", type="JobEnded")
        members = sorted(meeting.gathers, key=lambda name: int(name.split()[1]))
        return Answer(id, msgspec.msgpack.encode([meeting.gathers[name].value for name in members]))

    def leave(self, member: str) -> None:
        """``member`` has left: nobody needs to wait for it."""
        self._left.add(member)
        for meeting in list(self._meetings.values()):
            if not meeting.mismatch:  # then nobody waits in it
                self._check(meeting)

    def lose(self, member: str) -> None:
        """The process of ``member`` is lost: nobody waits for it, and what was between it and others is over.

        What it said to all of them stays, but for how to reach it.
        """
        self._lost.add(member)
        self._first_lost = self._first_lost or member
        self.waits.step(member, frames.Waiting())
        for key, meeting in list(self._meetings.items()):
            if any(name.startswith("worker") for name in meeting.gathers):
                meeting.refusal = self._refused(meeting.what)
            if meeting.arrived and meeting.complete(self._lost):
                self._end_meeting(key)

        def between(key: str, entry: _Entry) -> bool:
            if entry.to is None:
                return key == f"card/{member}"
            return entry.owner == member or entry.to <= {member, entry.owner}

        self._entries = {key: entry for key, entry in self._entries.items() if not between(key, entry)}
        asyncio.get_running_loop().create_task(self._notify())

    def admit(self, member: str) -> None:
        """Another process comes in the place of one that is lost, or is new."""
        self._lost.discard(member)
        self._left.discard(member)

    def _check(self, meeting: _Meeting) -> None:
        """Whether the members that have not left are still enough."""
        role = min(meeting.arrived, default="?").split()[0]
        missing = sorted(m for m in self._left if m.split()[0] == role and m not in meeting.arrived)
        if missing and self._sizes.get(role, meeting.parties) - len(missing) < meeting.parties:
            waiting = f"left the job while {', '.join(sorted(meeting.arrived))} waits for it in {meeting.what}"
            self._fail(Cause(missing[0], waiting, settle=LEFT_SECONDS))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def end(self) -> None:
        """Answers those that still wait."""
        self._ended = True
        await self._notify()


def _key(member: str, message: frames.Gather | frames.Compare) -> str:
    return f"{type(message).__name__}/{member.split()[0]}/{message.name}"


def _tops(key: str) -> list[str]:
    """``a``, ``a/b`` and ``a/b/c`` for a key ``a/b/c``."""
    return list(itertools.accumulate(key.split("/"), "{}/{}".format))


def _different_calls(meeting: _Meeting) -> str:
    """Who called what, where that differs; '' where it does not."""
    callers: dict[str, list[str]] = {}
    for member, message in sorted(meeting.gathers.items(), key=lambda item: int(item[0].split()[1])):
        callers.setdefault(message.call, []).append(member)
    if len(callers) < 2:
        return ""
    who = ", ".join(f"{' and '.join(members)} called {call}" for call, members in callers.items())
    return frames.bounded(f"{who}: all workers must make the same calls in the same order", 4096)


def _mismatch(meeting: _Meeting, member: str, message: frames.Compare) -> Cause | None:
    meeting.plans[member] = message
    return _difference(*next(iter(meeting.plans.items())), member, message)


def _difference(first_name: str, first: frames.Compare, member: str, message: frames.Compare) -> Cause | None:
    if message.digest == first.digest:
        return None
    lines = differing_lines(first_name, first.text, member, message.text)
    separator = "\n" if "\n" in lines else " "
    return Cause(member, f"does not agree with {first_name} on {message.name}:{separator}{lines}")
