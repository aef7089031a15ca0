"""The coordinator: one a job, a thread beside the launcher or a process of its own. Nothing of it runs per step."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tensorwire._native import forget_fd
from tensorwire.control import frames
from tensorwire.control.book import Book
from tensorwire.control.frames import Cause
from tensorwire.device import handshake
from tensorwire.device.acceptor import Acceptor
from tensorwire.errors import ArgumentError, ProtocolError

PURPOSE = b"control"
ROLES = ("worker", "server", "launcher")
# How long a second-hand report ("my peer is gone") waits for the first-hand one that explains it.
SETTLE_SECONDS = 0.5


@dataclass
class _Member:
    name: str
    writer: asyncio.StreamWriter
    seen: float
    left: bool = False
    requests: set[asyncio.Task[None]] = field(default_factory=set)


def member_name(role: str, index: int) -> str:
    """``worker 0``: how messages name a process."""
    return f"{role} {index}"


def describe_exit(status: int) -> str:
    """What a launcher says of a process that is gone; ``status`` as in ``Popen.returncode``."""
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"exited with status {status}"


class Coordinator:
    """Identity, address book, barriers, plan comparison, heartbeats and the end of one job.

    ``secret`` admits members. ``on_end`` is called once, from the coordinator's thread, with the cause or None.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        workers: int,
        servers: int,
        host: str = "127.0.0.1",
        port: int = 0,
        beat: float = 1.0,
        lost_after: float = 10.0,
        on_end: Callable[[Cause | None], None] | None = None,
    ) -> None:
        self._secret = secret
        self.workers, self.servers = workers, servers
        self.beat, self.lost_after = beat, lost_after
        self.job = secrets.token_hex(4)
        self.cause: Cause | None = None
        self.ended = threading.Event()
        self.empty = threading.Event()
        self._on_end = on_end
        self._members: dict[str, _Member] = {}
        self._gone: dict[str, str] = {}  # disconnected without a word -> how the launcher says it ended
        self._done: set[str] = set()
        self._second_hand: Cause | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(256)
        except OSError as error:
            listener.close()
            raise ArgumentError(f"the coordinator cannot listen on {host}:{port}: {error.strerror}") from None
        self.address = f"[{host}]:{listener.getsockname()[1]}" if ":" in host else f"{host}:{listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._book = Book(self._loop, self._mismatch)
        self._thread = threading.Thread(target=self._run, name="tensorwire-coordinator", daemon=True)
        self._thread.start()
        self._acceptor = Acceptor(listener, self._greet, "tensorwire-control")

    @property
    def members(self) -> list[str]:
        """Who is connected now."""
        return sorted(self._members)

    # ---- what other threads call

    def end(self, cause: Cause | None) -> None:
        """Ends the job for everybody; the first primary cause wins."""
        self._call(self._fail if cause else self._end, cause)

    def left(self, role: str, index: int, status: int) -> None:
        """A launcher's report of how a process ended."""
        self._call(self._left, role, index, status)

    def close(self) -> None:
        """Stops at once; members that are still there see the connection end. Idempotent."""
        self._acceptor.close()
        if self._loop.is_closed():
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._loop.call_soon_threadsafe(function, *args)

    # ---- connections

    def _greet(self, sock: socket.socket) -> None:
        sock.settimeout(self.lost_after)
        if handshake.accept(sock, self._secret) != PURPOSE:
            raise ProtocolError("not a control connection")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        ours = socket.socket(fileno=sock.detach())  # the acceptor closes what it still holds
        asyncio.run_coroutine_threadsafe(self._serve(ours), self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        beats = self._loop.create_task(self._watch())
        try:
            self._loop.run_forever()
        finally:
            beats.cancel()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            for member in self._members.values():
                member.writer.transport.abort()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def _serve(self, sock: socket.socket) -> None:
        descriptor = sock.fileno()
        reader, writer = await asyncio.open_connection(sock=sock)
        member: _Member | None = None
        try:
            member = self._admit(await self._receive(reader), writer)
            while True:
                message = await self._receive(reader)
                member.seen = time.monotonic()
                self._handle(member, message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except ProtocolError as error:
            if member is not None:
                self._fail(Cause(member.name, f"broke the control protocol: {error}"))
            else:
                self._send(writer, frames.Answer(0, error=str(error), type="ProtocolError"))
        finally:
            if member is not None:
                self._disconnected(member)
            forget_fd(descriptor)
            writer.close()

    async def _receive(self, reader: asyncio.StreamReader) -> frames.Any:
        size = frames.body_size(await reader.readexactly(frames.HEAD))
        return frames.decode(await reader.readexactly(size))

    def _admit(self, join: frames.Any, writer: asyncio.StreamWriter) -> _Member:
        if not isinstance(join, frames.Join):
            raise ProtocolError("the first frame must be a join")
        if join.version != frames.VERSION:
            raise ProtocolError(f"this job speaks control version {frames.VERSION}, not {join.version}")
        most = {"worker": self.workers, "server": self.servers, "launcher": 1 << 16}.get(join.role, 0)
        name = member_name(join.role, join.index)
        if not 0 <= join.index < most:
            raise ProtocolError(f"this job has no {name}: it has {self.workers} workers and {self.servers} servers")
        if name in self._members or name in self._done or name in self._gone:
            raise ProtocolError(f"{name} is already in this job: two processes with one rank, or two jobs at one place?")
        if self.ended.is_set():
            raise ProtocolError("this job has ended")
        member = _Member(name, writer, time.monotonic())
        self._members[name] = member
        welcome = frames.Welcome(self.job, 0, self.workers, self.servers, self.beat, self.lost_after)
        self._send(writer, welcome)
        return member

    def _send(self, writer: asyncio.StreamWriter, message: frames.Message) -> None:
        if not writer.is_closing():
            writer.write(frames.encode(message))

    def _handle(self, member: _Member, message: frames.Any) -> None:
        if isinstance(message, frames.Beat):
            return
        if isinstance(message, frames.Fail):
            self._fail(message.cause)
        elif isinstance(message, frames.Left):
            self._left(message.role, message.index, message.status)
        elif isinstance(message, frames.Bye):
            member.left = True
            self._done.add(member.name)
            if all(member_name("worker", i) in self._done for i in range(self.workers)):
                self._end(None)
        elif isinstance(message, (frames.Publish, frames.Lookup, frames.Barrier, frames.Compare)):
            task = self._loop.create_task(self._answer(member, message))
            member.requests.add(task)
            task.add_done_callback(member.requests.discard)
        else:
            raise ProtocolError(f"a {type(message).__name__} is nothing a member may send")

    async def _answer(
        self, member: _Member, message: frames.Publish | frames.Lookup | frames.Barrier | frames.Compare
    ) -> None:
        answer = await self._book.answer(member.name, message)
        self._send(member.writer, answer)

    # ---- life and death

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.beat)
            for member in list(self._members.values()):
                self._send(member.writer, frames.Beat())
                silent = time.monotonic() - member.seen
                if silent > self.lost_after and not member.left:
                    self._fail(Cause(member.name, f"sent no heartbeat for {silent:.0f} s: stopped, or cut off"))
                    member.writer.transport.abort()

    def _disconnected(self, member: _Member) -> None:
        for task in member.requests:
            task.cancel()
        self._members.pop(member.name, None)
        if not member.left and not self.ended.is_set():
            self._gone.setdefault(member.name, "")
            how = self._gone[member.name] or "is gone: its connection closed without a word"
            self._fail(Cause(member.name, how, settle=0.0 if self._gone[member.name] else SETTLE_SECONDS))
        if not self._members:
            self.empty.set()

    def _left(self, role: str, index: int, status: int) -> None:
        name = member_name(role, index)
        if name in self._done and status == 0:
            return
        how = describe_exit(status) if status else "exited before it joined or left the job (status 0)"
        self._gone[name] = how
        self._fail(Cause(name, how))

    def _mismatch(self, cause: Cause) -> None:
        self._fail(cause)

    def _fail(self, cause: Cause) -> None:
        if self.ended.is_set():
            return
        if not cause.settle:
            self._end(cause)
        elif self._second_hand is None:
            self._second_hand = cause
            self._loop.call_later(cause.settle, self._end, cause)

    def _end(self, cause: Cause | None) -> None:
        if self.ended.is_set():
            return
        self.cause = cause
        self.ended.set()
        for member in self._members.values():
            self._send(member.writer, frames.End(cause))
        self._book.end(cause)
        if not self._members:
            self.empty.set()
        if self._on_end is not None:
            self._on_end(cause)
