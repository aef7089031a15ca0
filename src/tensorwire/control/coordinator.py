"""The coordinator: one per job, as a thread of the launcher or a process of its own. None of it runs per step."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tensorwire._native import close_on_fork, forget_fd
from tensorwire.addresses import address_text
from tensorwire.control import frames
from tensorwire.control.authentication import GREETING_SECONDS, Authenticator
from tensorwire.control.book import Book
from tensorwire.control.clock import pack_time
from tensorwire.control.frames import Cause
from tensorwire.control.membership import Membership
from tensorwire.control.names import GONE, MOST_READERS, READER, READER_LEFT, describe_exit, member_name
from tensorwire.control.settings import MOST_MEMBERS, FailureTimes
from tensorwire.control.stall import Stall
from tensorwire.errors import ArgumentError, AuthenticationError, JobEnded, ProtocolError

# How long a second-hand report ("its connection closed") waits for the first-hand one that explains it.
SETTLE_SECONDS = 0.5


@dataclass
class _Member:
    name: str
    writer: asyncio.StreamWriter
    seen: float
    left: bool = False
    failed: bool = False  # it has said why
    lost: bool = False  # the job goes on without it

    @property
    def reads(self) -> bool:
        """Whether it is a reader, whose fate is nobody's but its own."""
        return self.name.startswith(READER)


@dataclass(frozen=True)
class Report:
    """What a member said of itself, and when it arrived here (`time.monotonic`)."""

    stats: frames.Stats
    at: float


def listen(interface: str, port: int) -> socket.socket:
    """A listening socket. Raises `ArgumentError`."""
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((interface, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise ArgumentError(f"the coordinator cannot listen on {interface}:{port}: {error.strerror}") from None
    return listener


class Coordinator:
    """Identity, address book, barriers, plan comparison, heartbeats and the end of one job.

    ``secret`` admits members. They show that they live every ``beat`` seconds, and are lost after ``lost_after``
    seconds of silence. ``stats_every``: seconds between members' reports of themselves; 0: they make none. ``on_end``
    is called once, from the coordinator's thread, with the cause or None. ``who``: how people know this process.

    ``min_workers``: with at least so many workers left the job goes on without those that are lost; 0: the first loss
    ends it. With fewer it waits for ``rejoin_seconds`` until others have joined. From the coordinator's thread
    ``on_members`` is called with each new membership, and ``on_loss`` with each loss, when there is the best account.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        workers: int,
        servers: int,
        interface: str = "127.0.0.1",
        port: int = 0,
        beat: float = 1.0,
        lost_after: float = 10.0,
        stats_every: float = 0.0,
        on_end: Callable[[Cause | None], None] | None = None,
        who: str = "the coordinator",
        min_workers: int = 0,
        rejoin_seconds: float = 0.0,
        on_loss: Callable[[Cause], None] | None = None,
        on_members: Callable[[Membership], None] | None = None,
    ) -> None:
        self.workers, self.servers = workers, servers
        self.membership = Membership.first(workers, min_workers)
        self.beat, self.lost_after, self.stats_every = beat, lost_after, stats_every
        self.job = secrets.token_hex(4)
        self.cause: Cause | None = None
        self.ended = threading.Event()
        self.empty = threading.Event()
        self._rejoin_seconds = rejoin_seconds
        self._on_end, self._on_loss, self._on_members = on_end, on_loss, on_members
        self._members: dict[str, _Member] = {}
        self._joined: set[str] = set()
        self._done: set[str] = set()
        self._exits: dict[str, int] = {}
        self._stats: dict[str, Report] = {}
        self._unseen: set[str] = set()  # who is lost, and whose process may not have ended yet
        self._untold: dict[str, Cause] = {}  # losses of which there may be a better account
        self._second_hand: Cause | None = None
        self._short = 0  # the epoch since which there are too few workers; 0: there are enough
        self._stall = Stall(who, beat, FailureTimes.of(lost_after).leaves)
        self._authenticator = Authenticator(secret)
        self._book = Book({"worker": workers, "server": servers}, self._fail, self._tell, survives=min_workers > 0)
        listener = listen(interface, port)
        self.address = address_text(interface, listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="tensorwire-coordinator", daemon=True)
        self._thread.start()

    @property
    def members(self) -> list[str]:
        """Who is connected now."""
        return sorted(self._members)

    @property
    def stats(self) -> dict[str, Report]:
        """Each member's latest report, also of those that have left."""
        return self._stats.copy()

    # ---- what other threads call

    def end(self, cause: Cause | None) -> None:
        """Ends the job for everybody; the first primary cause wins."""
        self._call(self._fail if cause else self._end, cause)

    def left(self, role: str, index: int, status: int) -> None:
        """A launcher's report of how a process ended."""
        self._call(self._left, role, index, status)

    def stopped(self, role: str, index: int, seconds: float) -> None:
        """A launcher's report of how long a process has been stopped; once it has joined, heartbeats count instead."""
        self._call(self._stopped, role, index, seconds)

    def has_joined(self, name: str) -> bool:
        """Whether that member is, or was, in the job."""
        return name in self._joined

    def close(self) -> None:
        """Stops at once; members that are still there see the connection end. Idempotent."""
        self._call(self._stop.set)
        self._thread.join(10.0)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._loop.call_soon_threadsafe(function, *args)

    # ---- connections

    def _run(self, listener: socket.socket) -> None:
        close_on_fork(listener.fileno())
        try:
            self._loop.run_until_complete(self._serve(listener))
        finally:
            self._loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        """Until ``close()``. asyncio's own server loses connections that come while it closes."""
        listener.setblocking(False)
        connections: dict[asyncio.Task[None], socket.socket] = {}
        accepting = self._loop.create_task(self._accept(listener, connections))
        watch = self._loop.create_task(self._watch())
        await self._stop.wait()
        listener.shutdown(socket.SHUT_RDWR)  # wakes it
        await accepting
        forget_fd(listener.fileno())
        listener.close()
        watch.cancel()
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task(self._loop)}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(5):  # transports close in the loop's next rounds
            await asyncio.sleep(0)
        for sock in connections.values():  # of tasks that were cancelled before they began
            sock.close()

    async def _accept(self, listener: socket.socket, connections: dict[asyncio.Task[None], socket.socket]) -> None:
        while not self._stop.is_set():
            try:
                sock, _ = await self._loop.sock_accept(listener)
            except OSError:  # the stranger gave up, no descriptor is free, or we close
                await asyncio.sleep(0.01)
                continue
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._connected(sock))
            connections[task] = sock
            task.add_done_callback(lambda t: None if self._stop.is_set() else connections.pop(t, None))
            await asyncio.sleep(0)  # a flood of connections must not keep those that are there from speaking

    async def _connected(self, sock: socket.socket) -> None:
        """One connection, from its first byte to its last. A stranger can end nothing but this connection."""
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            await self._authenticator.admit(reader, writer)
            member = await self._join(reader, writer)
            if member is not None:
                await self._converse(member, reader)
        except (AuthenticationError, ProtocolError, asyncio.IncompleteReadError, asyncio.TimeoutError, OSError):
            pass  # a stranger
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            writer.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Member | None:
        try:
            return self._admit(await asyncio.wait_for(self._receive(reader), GREETING_SECONDS), writer)
        except (ProtocolError, JobEnded) as error:
            self._send(writer, frames.Answer(0, error=str(error), type=type(error).__name__))
            return None

    async def _converse(self, member: _Member, reader: asyncio.StreamReader) -> None:
        requests: set[asyncio.Task[None]] = set()
        try:
            while True:
                message = await self._receive(reader)
                member.seen = time.monotonic()
                if isinstance(message, frames.Question):
                    task = self._loop.create_task(self._answer(member, message))
                    requests.add(task)
                    task.add_done_callback(requests.discard)
                else:
                    self._handle(member, message)
        except ProtocolError as error:
            if not member.reads:
                self._fail(Cause(member.name, f"broke the control protocol: {error}"))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for task in requests:
                task.cancel()
            self._disconnected(member)

    async def _receive(self, reader: asyncio.StreamReader) -> frames.Any:
        size = frames.body_size(await reader.readexactly(frames.HEAD))
        return frames.decode(await reader.readexactly(size))

    def _admit(self, join: frames.Any, writer: asyncio.StreamWriter) -> _Member:
        if not isinstance(join, frames.Join):
            raise ProtocolError("the first frame must be a join")
        if join.version != frames.VERSION:
            raise ProtocolError(f"this job speaks control version {frames.VERSION}, not {join.version}")
        if self.ended.is_set():
            raise JobEnded(str(self.cause) if self.cause else "the job has ended")
        ranks = MOST_MEMBERS if self.membership.survives else self.workers
        sizes = {"worker": ranks, "server": self.servers, "launcher": 1 << 16, READER: MOST_READERS}
        most = sizes.get(join.role, 0)
        name = member_name(join.role, join.index)
        if not 0 <= join.index < most:
            raise ProtocolError(f"this job has no {name}: it has {self.workers} workers and {self.servers} servers")
        joins = join.role == "worker" and self.membership.survives and join.index not in self.membership.workers
        if joins:
            self._make_room(name)
        elif name in self._done:
            raise ProtocolError(f"{name} has left this job, and a job is joined once")
        elif name in self._joined or name in self._members:
            raise ProtocolError(
                f"{name} is already in this job: two processes with one rank, or two jobs at one place?"
            )
        member = _Member(name, writer, time.monotonic())
        self._members[name] = member
        if not member.reads:
            self._joined.add(name)
            self.empty.clear()
        times = (self.beat, self.lost_after, self.stats_every)
        if joins:
            self.membership = self.membership.join(join.index)
            self._short = 0 if self.membership.enough else self._short
        mine = self.membership.workers.get(join.index, 0) if join.role == "worker" else 0
        known = (self.job, mine, self.workers, self.servers)
        self._send(writer, frames.Welcome(*known, *times, self.membership.least, joins))
        if joins:
            self._tell_epoch(Cause(name, "joins"))
        elif self.membership.epoch:
            self._send(writer, frames.Epoch(self.membership))
        return member

    def _make_room(self, name: str) -> None:
        """A process comes in the place of one that is out of the job. Raises `ProtocolError` while that is there."""
        if any(done.startswith("worker") for done in self._done - {name}):
            raise JobEnded("others have finished the training")
        if name in self._members:
            raise ProtocolError(f"the process that was {name} is still leaving: start another one once it is gone")
        self._done.discard(name)
        self._exits.pop(name, None)
        self._book.admit(name)

    def _tell_epoch(self, news: Cause | None = None) -> None:
        """Everybody learns of the membership as it is now; people, too, where it is good ``news``."""
        for member in self._members.values():
            if not member.reads and not member.lost:
                self._send(member.writer, frames.Epoch(self.membership))
        if self._on_members is not None:
            self._on_members(self.membership)
        if news is not None and self._on_loss is not None:
            self._on_loss(Cause(news.who, f"{news.what}: {self.membership.outlook()}"))

    def _send(self, writer: asyncio.StreamWriter, message: frames.Message) -> None:
        if not writer.is_closing():
            writer.write(frames.encode(message))

    def _tell(self, name: str, text: str) -> None:
        if name in self._members:
            self._send(self._members[name].writer, frames.Note(frames.bounded(text, 4096)))

    def _handle(self, member: _Member, message: frames.Any) -> None:
        if isinstance(message, frames.Beat) or (member.reads and isinstance(message, (frames.Bye, frames.Stats))):
            return
        if isinstance(message, frames.Tell):
            if message.to in self._members and message.topic != READER_LEFT:
                told = frames.Tell(message.to, message.topic, message.value, member.name)
                self._send(self._members[message.to].writer, told)
            return
        if member.reads and not isinstance(message, frames.ClockReading):
            raise ProtocolError(f"a {type(message).__name__} is nothing a reader may send")
        if isinstance(message, frames.Stats):
            self._stats[member.name] = Report(message, member.seen)
        elif isinstance(message, frames.ClockReading):  # at once: how long it takes is what the member measures
            self._send(member.writer, frames.Answer(message.id, pack_time()))
        elif isinstance(message, frames.Forget):
            self._loop.create_task(self._book.forget(member.name, message.key))
        elif isinstance(message, frames.Fail):
            member.failed = True
            cause = self._stall.blame(message.cause) if message.cause.settle else message.cause
            if not message.alone or cause.who != member.name:
                self._fail(cause)
            elif cause.settle:  # a lost peer may be why, and its own loss the better account
                self._loop.call_later(cause.settle, self._lose, member.name, cause)
            else:
                self._lose(member.name, cause)
        elif isinstance(message, frames.Suspect):
            self._loop.call_later(SETTLE_SECONDS, self._suspect, member.name, message)
        elif isinstance(message, frames.Left):
            self._left(message.role, message.index, message.status)
        elif isinstance(message, frames.Stopped):
            self._stopped(message.role, message.index, message.seconds)
        elif isinstance(message, frames.Waiting):
            self._book.waits.step(member.name, message)
        elif isinstance(message, frames.Bye):
            member.left = True
            self._done.add(member.name)
            self._book.leave(member.name)
            if message.early:
                self._leave(member.name)
            self._end_if_done()
        else:
            raise ProtocolError(f"a {type(message).__name__} is nothing a member may send")

    async def _answer(self, member: _Member, message: frames.Question) -> None:
        self._send(member.writer, await self._book.answer(member.name, message))

    # ---- liveness and death

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.beat)
            stalled = self._stall.tick()  # while this process did not run, it received nothing
            now = time.monotonic()
            for member in list(self._members.values()):
                self._send(member.writer, frames.Beat())
                member.seen += stalled
                silent = now - member.seen
                if silent > self.lost_after and not member.left:
                    if not member.reads:
                        silence = f"sent no heartbeat for {silent:.0f} s: stopped, or cut off"
                        self._lose(member.name, Cause(member.name, silence))
                    if not member.lost or silent > 2 * self.lost_after:  # else it may yet read that it is out
                        member.writer.transport.abort()

    def _disconnected(self, member: _Member) -> None:
        del self._members[member.name]
        if member.reads:
            self._loop.create_task(self._book.drop(member.name))
            for other in self._members.values():
                if other.name.startswith("server"):
                    self._send(other.writer, frames.Tell(other.name, READER_LEFT, b"", member.name))
            return
        self._book.waits.step(member.name, frames.Waiting())
        if member.name in self._exits:
            self._judge(member.name)
        elif not member.left and not member.failed:
            cause = self._stall.blame(Cause(member.name, GONE, settle=SETTLE_SECONDS))
            self._lose(member.name, cause)
        if all(other.reads for other in self._members.values()):
            self.empty.set()

    def _left(self, role: str, index: int, status: int) -> None:
        name = member_name(role, index)
        self._exits[name] = status
        if name in self._unseen:
            self._unseen.discard(name)
        elif name in self._members:  # its last words may still be on their way
            self._loop.call_later(SETTLE_SECONDS, self._judge, name)
        else:
            self._judge(name)

    def _stopped(self, role: str, index: int, seconds: float) -> None:
        name = member_name(role, index)
        if name not in self._joined:
            self._fail(Cause(name, f"was stopped before it joined the job, {seconds:.0f} s ago"))

    def _judge(self, name: str) -> None:
        """The process of ``name`` is gone; was that all right?"""
        status = self._exits[name]
        if name in self._done and self.membership.survives:
            return
        if status:
            cause = Cause(name, describe_exit(status))
            if status > 0 and name not in self._done:
                cause = self._stall.blame(cause)
            if name in self._done and self._second_hand is None:
                # It had said goodbye. If nobody misses it, the others are about to say theirs, and all is well.
                self._loop.call_later(SETTLE_SECONDS, self._fail, cause)
            else:
                self._lose(name, cause)
        elif name not in self._joined:
            self._fail(Cause(name, "exited without joining the job: its script has to call tensorwire.init()"))
        elif name not in self._done:
            self._lose(name, self._stall.blame(Cause(name, "exited with status 0 in the middle of the job")))

    def _suspect(self, name: str, message: frames.Suspect) -> None:
        """A member said that its connection to a worker is gone: if by now nothing else explains that, so be it."""
        if self.membership.workers.get(message.worker) == message.incarnation:
            worker = member_name("worker", message.worker)
            self._lose(worker, Cause(worker, f"lost its connection to {name}"))

    def _lose(self, name: str, cause: Cause) -> None:
        """``cause`` is that the process of ``name`` is lost: the job goes on without it, or ends."""
        role, _, index = name.partition(" ")
        alone = role == "worker" and name not in self._done and cause.who == name
        if not (self.membership.survives and self._book.has_begun and alone):
            self._fail(cause)
            return
        now = self.membership.lose(int(index), cause.bounded().what)
        if self.ended.is_set():
            return
        if now is self.membership:  # it was lost before; another process in its place may have got no further
            if name in self._exits and name not in self._members and self._on_loss is not None:
                self._on_loss(Cause(name, f"{describe_exit(self._exits[name])} before it joined"))
            return
        if name not in self._exits:
            self._unseen.add(name)
        if name in self._members:
            self._members[name].lost = True
            self._send(self._members[name].writer, frames.End(cause.bounded()))
        self._go_on(now, name, cause)
        self._end_if_done()

    def _leave(self, name: str) -> None:
        """A worker is done before the others."""
        cause = Cause(name, "left the job")
        now = self.membership.lose(int(name.split()[1]), cause.what, left=True)
        if self.membership.survives and now is not self.membership:
            self._go_on(now, name, cause)

    def _go_on(self, now: Membership, name: str, cause: Cause) -> None:
        """The membership is another one from now on, without a worker."""
        self.membership = now
        self._book.lose(name)
        self._tell_epoch()
        self._untold[name] = cause
        if cause.settle:
            self._loop.call_later(cause.settle, self._tell_loss, name)
        else:
            self._tell_loss(name)

    def _tell_loss(self, name: str) -> None:
        """Says what is best known of how a worker was lost; it is the job's end if too few are left."""
        cause = self._untold.pop(name, None)
        if cause is None:
            return
        if name in self._exits and not cause.traceback:
            cause = Cause(name, describe_exit(self._exits[name]))
        told = Cause(name, f"{cause.what}: {self.membership.outlook()}", cause.traceback)
        if not self.membership.enough and not self._rejoin_seconds:
            self._fail(told)
            return
        if not self.membership.enough:
            told = Cause(name, f"{told.what}: waiting up to {self._rejoin_seconds:g} s for others", cause.traceback)
            self._short = self._short or self.membership.epoch
            self._loop.call_later(self._rejoin_seconds, self._give_up, self._short, name, cause)
        if self._on_loss is not None:
            self._on_loss(told)

    def _give_up(self, epoch: int, name: str, cause: Cause) -> None:
        """There may have been too few workers since that epoch."""
        if self._short == epoch:
            waited = f"{self.membership.outlook()}, and nobody joined within {self._rejoin_seconds:g} s"
            self._fail(Cause(name, f"{cause.what}: {waited}", cause.traceback))

    def _end_if_done(self) -> None:
        """The job ends well when every worker that is in has left in good order."""
        if self._done and all(member_name("worker", rank) in self._done for rank in self.membership.workers):
            self._end(None)

    def _fail(self, cause: Cause) -> None:
        if self.ended.is_set():
            return
        if not cause.settle:
            self._end(cause)
        elif self._second_hand is None or cause.settle < self._second_hand.settle:  # shorter, because it is better
            self._second_hand = cause
            self._loop.call_later(cause.settle, self._end, cause)

    def _end(self, cause: Cause | None) -> None:
        if self.ended.is_set():
            return
        if cause is None and self._untold:
            self._loop.call_later(SETTLE_SECONDS, self._end, None)
            return
        self.cause = None if cause is None else cause.bounded()
        self.ended.set()
        for member in self._members.values():
            self._send(member.writer, frames.End(self.cause))
        self._loop.create_task(self._book.end())
        if all(member.reads for member in self._members.values()):
            self.empty.set()
        if self._on_end is not None:
            self._on_end(self.cause)
