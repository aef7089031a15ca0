"""A process's one connection to the coordinator."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict
from queue import Empty, SimpleQueue

import msgspec

from tensorwire import errors
from tensorwire._native import Heartbeat, close_on_fork, forget_fd
from tensorwire.control import frames
from tensorwire.control.address import connect
from tensorwire.control.clock import distance
from tensorwire.control.frames import Cause
from tensorwire.control.membership import Membership
from tensorwire.control.names import PURPOSE, READER_LEFT, STATS, member_name
from tensorwire.control.settings import FailureTimes
from tensorwire.device import handshake
from tensorwire.errors import JobEnded, PeerLost, ProtocolError, TensorwireError, WorkerFinished
from tensorwire.observe import counters, spans
from tensorwire.observe.scalars import scalars
from tensorwire.observe.spans import Clock
from tensorwire.sizes import size_text

_log = logging.getLogger("tensorwire")
_LOOK = 0.5  # seconds between looks whether the job has ended, while others are asked
_NUMBER = 8  # bytes of a question's number
_SLACK = 5.0  # the coordinator's own timeout comes first, with the better message


class Client:
    """Joins a job and speaks for one member. Heartbeats come from a native thread, whatever Python does.

    ``address`` is ``HOST:PORT``; ``patience``: seconds to wait for a coordinator that has no name yet, or has not
    started. Raises `AuthenticationError`, `ProtocolError` (no such member, joined twice), `JobEnded` or `PeerLost`
    (nobody listens there).
    """

    def __init__(
        self, address: str, secret: bytes, role: str, index: int, *, patience: float = 0.0, timeout: float = 60.0
    ) -> None:
        self.name = member_name(role, index)
        self.address, self.secret = address, secret
        self.cause: Cause | None = None
        self.ended = threading.Event()
        self.lost = False  # the job ended here because the coordinator fell silent: no other process reports it
        self._calls: list[Callable[[Cause | None], None]] = []
        self._on_members: list[Callable[[Membership], object]] = []
        self._told: dict[str, Callable[[str, bytes], object]] = {}
        self._left: list[Callable[[str], object]] = []
        self._ids = itertools.count(1)
        self._pending: dict[int, Future[frames.Answer]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._closing = threading.RLock()  # held until the connection has really ended
        self._sock = handshake.persist(lambda left: _authenticated(address, secret, patience, left), timeout)
        try:
            self.welcome = self._join(role, index)
        except BaseException:
            self._sock.close()
            raise
        self.membership = Membership.first(self.welcome.workers, self.welcome.least)
        self._sock.settimeout(self.welcome.lost_after)
        close_on_fork(self._sock.fileno())
        self._heartbeat = Heartbeat(self._sock.fileno(), frames.encode(frames.Beat()), self.welcome.beat)
        self.answer(STATS, lambda *_: frames.encode(_stats())[frames.HEAD :])
        self._thread = threading.Thread(target=self._listen, name="tensorwire-control", daemon=True)
        self._thread.start()
        self._quiet = threading.Event()
        self._reporter: threading.Thread | None = None
        if self.welcome.stats and role != "launcher":
            self._reporter = threading.Thread(target=self._report, name="tensorwire-stats", daemon=True)
            self._reporter.start()

    def _join(self, role: str, index: int) -> frames.Welcome:
        join = frames.Join(frames.VERSION, role, index, os.getpid(), socket.gethostname())
        self._sock.sendall(frames.encode(join))
        welcome = self._receive()
        if isinstance(welcome, frames.Answer):
            raise _exception(welcome)
        if not isinstance(welcome, frames.Welcome):
            raise ProtocolError("the coordinator did not answer the join")
        return welcome

    # ---- requests: each is an RPC

    def publish(self, key: str, value: bytes, to: list[str] | None = None) -> None:
        """Puts ``value`` into the address book, for all or for those named.

        Raises:
            AlreadyPublished: Somebody did so before, under the same ``key``.
            ProtocolError: ``value`` is above 32 MiB.
        """
        parts = max(1, -(-len(value) // frames.PART_BYTES))
        if parts > frames.MOST_PARTS:
            raise ProtocolError(
                f"{key!r} is {size_text(len(value))}; the address book takes "
                f"{size_text(frames.MOST_PARTS * frames.PART_BYTES)}: a model of this many tensors is too large"
            )
        for part in range(parts):
            piece = value[part * frames.PART_BYTES : (part + 1) * frames.PART_BYTES]
            self._request(frames.Publish(next(self._ids), key, piece, to, part, parts), 60.0)

    def lookup(self, key: str, timeout: float = 60.0, *, owner: str | None = None) -> bytes:
        """The value published under ``key``; waits for it.

        Raises `WaitTimeout`, or, where ``owner`` is given, a member or a role: `RemoteAccessError` if another one
        published it, `PeerLost` if that member is lost, and has not.
        """
        first = self._request(frames.Lookup(next(self._ids), key, _seconds(timeout), owner=owner), timeout)
        values = [first.value]
        for part in range(1, first.parts):
            values.append(self._request(frames.Lookup(next(self._ids), key, 60.0, part, owner), 60.0).value)
        return b"".join(values)

    def lookup_later(self, key: str, timeout: float, then: Callable[[bytes | TensorwireError], object]) -> None:
        """Calls ``then`` from the control thread, with a short value that was published under ``key``, or an error.

        `WaitTimeout` after ``timeout`` seconds, or `JobEnded`.
        """

        def done(future: Future[frames.Answer]) -> None:
            error = future.exception()
            then(error if isinstance(error, TensorwireError) else future.result().value)

        request = frames.Lookup(next(self._ids), key, _seconds(timeout))
        self._begin(request).add_done_callback(done)

    def forget(self, key: str) -> None:
        """Servers: this one needs ``key``, and the entries below it, no more."""
        self._send(frames.encode(frames.Forget(key)))

    def barrier(self, name: str, parties: int, timeout: float = 600.0) -> None:
        """Returns when ``parties`` members of this one's role have come here. Raises `WaitTimeout`, naming who came."""
        self.gather(name, f"barrier {name!r}", b"", parties, timeout)

    def compare(self, name: str, digest: bytes, text: str, parties: int, timeout: float = 600.0) -> bool:
        """Returns when ``parties`` members have shown the same digest; else ends the job with `PlanMismatch`.

        True: they had done so before this member came to the job; if it differs, it alone gets `PlanMismatch`.

        ``text`` says in lines what the digest is of; where digests differ, people are shown the lines that differ.
        """
        text = frames.bounded(text, frames.PART_BYTES)
        request = frames.Compare(next(self._ids), name, digest, text, parties, _seconds(timeout))
        return self._request(request, timeout).value == frames.LATE

    def gather(self, name: str, call: str, value: bytes, parties: int, timeout: float = 600.0) -> list[bytes]:
        """Returns the values of all ``parties`` members of this one's role, by index, when all have come.

        Args:
            name: The same on all members; a member comes to each name once, or again after `WaitTimeout`.
            call: What this member was asked to do, in words. All members have to say the same.
            value: Bytes; those of all members together at most ``frames.GATHERED_BYTES``.
            parties: How many members there are.
            timeout: Seconds to wait for the others.

        Raises:
            PlanMismatch: The calls differ. The message names members and calls.
            WaitTimeout: Not all came in time. The message names those that came.
            JobEnded: The job ended meanwhile.
        """
        request = frames.Gather(next(self._ids), name, call, value, parties, _seconds(timeout))
        return msgspec.msgpack.decode(self._request(request, timeout).value, type=list[bytes])

    def clock(self) -> Clock:
        """How far this process's clock is from the coordinator's."""
        return distance(lambda: self._request(frames.ClockReading(next(self._ids)), 60.0).value)

    def _begin(self, message: frames.Request) -> Future[frames.Answer]:
        data = frames.encode(message)
        counters.add(rpcs=1)
        future: Future[frames.Answer] = Future()
        with self._lock:
            if self._closed or self.ended.is_set():
                raise self.error()
            self._pending[message.id] = future
        self._send(data)
        return future

    def _request(self, message: frames.Request, timeout: float) -> frames.Answer:
        future = self._begin(message)
        timeout = _seconds(timeout) + _SLACK
        try:
            return future.result(timeout)
        except FutureTimeout:
            if future.done():  # the answer itself is a WaitTimeout, which is a TimeoutError
                raise
            raise errors.WaitTimeout(f"the coordinator did not answer within {timeout:g} s") from None
        finally:
            self._pending.pop(message.id, None)
            del future  # the traceback of its error leads here: a cycle, that would keep what callers hold

    # ---- news

    def fail(self, cause: Cause, *, alone: bool = False) -> None:
        """Reports a failure, which ends the job for everybody; ``alone``: this process's own, if others may go on."""
        self._send(frames.encode(frames.Fail(cause.bounded(), alone)))

    def suspect(self, worker: int, incarnation: int) -> None:
        """Reports that a connection to a worker is gone. The coordinator decides whether that is lost."""
        self._send(frames.encode(frames.Suspect(worker, incarnation)))

    def on_members(self, call: Callable[[Membership], object]) -> None:
        """Calls ``call(membership)`` from the control thread for each new one; at once if there has been one.

        It must neither raise nor wait.
        """
        with self._lock:
            self._on_members.append(call)
            if not self.membership.epoch:
                return
        call(self.membership)

    def report_exit(self, role: str, index: int, status: int) -> None:
        """For launchers: how a process of this machine ended."""
        self._send(frames.encode(frames.Left(role, index, status)))

    def report_stop(self, role: str, index: int, seconds: float) -> None:
        """For launchers: a process of this machine has been stopped for ``seconds``. Ignored once it has joined."""
        self._send(frames.encode(frames.Stopped(role, index, _seconds(seconds))))

    def waits(self, place: str = "", whom: str = "", seconds: float = 0.0) -> None:
        """Says that this worker has waited in ``place`` for ``seconds``, and then, without a place, no longer.

        Meanwhile it prints now and then for whom: for ``whom``, or for the workers that do not wait there.
        """
        self._send(frames.encode(frames.Waiting(place, whom, seconds)))

    def tell(self, to: str, topic: str, value: bytes) -> None:
        """A word to another member, such as ``server 0``: it gets it once, or never if it is not there."""
        self._send(frames.encode(frames.Tell(to, topic, value)))

    def on_told(self, topic: str, call: Callable[[str, bytes], object] | None) -> None:
        """Calls ``call(sender, value)`` from the control thread for each word under ``topic``; None: no more.

        It must neither raise nor wait.
        """
        if call is None:
            self._told.pop(topic, None)
        else:
            self._told[topic] = call

    def answer(self, topic: str, call: Callable[[str, bytes], bytes] | None, *, slow: bool = False) -> None:
        """Answers what others `ask` under ``topic`` by ``call(asker, value)``; None: no more.

        It must not raise. ``slow``: each call has a thread of its own, and may wait; else it is as for `on_told`.
        """

        def told(asker: str, value: bytes) -> None:
            assert call is not None
            number, value = value[:_NUMBER], value[_NUMBER:]
            self.tell(asker, _answers(topic, number), call(asker, value))

        def told_slowly(asker: str, value: bytes) -> None:
            threading.Thread(target=told, args=(asker, value), name=f"answer to {asker}", daemon=True).start()

        self.on_told(topic, None if call is None else told_slowly if slow else told)

    def ask(self, whom: Collection[str], topic: str, value: bytes, timeout: float) -> dict[str, bytes]:
        """What those members `answer` who do so within ``timeout`` seconds, by name."""
        answers: SimpleQueue[tuple[str, bytes]] = SimpleQueue()
        found: dict[str, bytes] = {}
        end, number = time.monotonic() + timeout, next(self._ids).to_bytes(_NUMBER, "big")
        mine = _answers(topic, number)  # none that comes late is taken for one to the next question
        self.on_told(mine, lambda name, said: answers.put((name, said)))
        try:
            for name in whom:
                self.tell(name, topic, number + value)
            while not found.keys() >= set(whom) and not self.ended.is_set():
                with contextlib.suppress(Empty):
                    found.update([answers.get(timeout=min(_LOOK, max(0.0, end - time.monotonic())))])
                    continue
                if time.monotonic() >= end:
                    break
        finally:
            self.on_told(mine, None)
        return found

    def on_reader_left(self, call: Callable[[str], object]) -> Callable[[], None]:
        """Servers: calls ``call(name)`` likewise for each reader that is gone. Returns what ends that."""
        self._left.append(call)
        return lambda: self._left.remove(call)

    def bye(self) -> None:
        """Says that this member is done, and stays in the job until ``ended``."""
        self._send(frames.encode(frames.Bye()))

    def on_end(self, call: Callable[[Cause | None], None]) -> None:
        """Calls ``call(cause)`` from the control thread when the job ends; at once if it has."""
        with self._lock:
            if not self.ended.is_set():
                self._calls.append(call)
                return
        call(self.cause)

    def error(self) -> JobEnded:
        """The job's end as an exception."""
        if self.cause is None:
            return JobEnded("the job has ended")
        kind = WorkerFinished if self.cause.kind == WorkerFinished.__name__ else JobEnded
        return kind(str(self.cause))

    def close(self, *, goodbye: bool = False, early: bool = False) -> None:
        """Closes the connection; without a goodbye the coordinator takes it for a death. Idempotent.

        ``early``: the goodbye of a worker without which the job goes on.
        """
        with self._closing:
            if not self._closed:
                self._end(goodbye, early)

    def _end(self, goodbye: bool, early: bool) -> None:
        with self._lock:
            self._closed = True
        self._quiet.set()
        if goodbye:
            last = [] if self._reporter is None else [_stats()]
            for message in (*last, frames.Bye(early)):
                self._heartbeat.send(frames.encode(message), 5.0)
        self._heartbeat.close()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, self._reporter):
            if thread is not None and threading.current_thread() is not thread:
                thread.join(5.0)
        if self._sock.fileno() >= 0:
            forget_fd(self._sock.fileno())
        self._sock.close()
        self._release()

    # ---- the connection

    def _send(self, data: bytes) -> None:
        error = self._heartbeat.send(data, self.welcome.lost_after)
        if error and not self._closed:
            self._lose(f"cannot be reached: {os.strerror(error)}")

    def _receive(self) -> frames.Any:
        size = frames.body_size(handshake.receive_exactly(self._sock, frames.HEAD))
        return frames.decode(handshake.receive_exactly(self._sock, size))

    def _listen(self) -> None:
        try:
            while True:
                self._await_frame()
                message = self._receive()
                if isinstance(message, frames.Answer):
                    self._settle(message)
                elif isinstance(message, frames.Note):
                    _log.warning("%s", message.text)
                elif isinstance(message, frames.Tell):
                    self._deliver(message)
                elif isinstance(message, frames.Epoch):
                    with self._lock:
                        self.membership, calls = message.membership, list(self._on_members)
                    for call in calls:
                        call(message.membership)
                elif isinstance(message, frames.End):
                    self._finish(message.cause)
        except (PeerLost, ProtocolError, OSError) as error:
            if not self._closed:
                self._lose(f"is gone: {error}")

    def _deliver(self, word: frames.Tell) -> None:
        if word.topic == READER_LEFT:
            for call in list(self._left):
                call(word.sender)
        elif word.topic in self._told:
            self._told[word.topic](word.sender, word.value)

    def _await_frame(self) -> None:
        """Returns when there is something to read. Silence is counted in waits of ours: while this process was stopped,
        and the coordinator perhaps with it, nobody was silent."""
        beat, leaves, _ = FailureTimes.of(self.welcome.lost_after)
        ready = select.poll()
        ready.register(self._sock, select.POLLIN)
        for _ in range(math.ceil(leaves / beat)):
            if ready.poll(beat * 1e3):
                return
        raise PeerLost(f"the other side of a connection fell silent for {leaves:g} s")

    def _report(self) -> None:
        """Reports to the coordinator now and then what this process has done, because it asked for that."""
        while not (self._quiet.wait(self.welcome.stats) or self.ended.is_set()):
            if self._heartbeat.send(frames.encode(_stats()), self.welcome.lost_after):
                return  # the listening thread reports how the connection ended

    def _settle(self, answer: frames.Answer) -> None:
        with self._lock:
            future = self._pending.pop(answer.id, None)
        if future is None:
            return
        if answer.error:
            future.set_exception(self.error() if self.cause and answer.type == "JobEnded" else _exception(answer))
        else:
            future.set_result(answer)

    def _lose(self, how: str) -> None:
        self.lost = not self.ended.is_set()
        with contextlib.suppress(OSError):  # should the coordinator come back, it is to see at once that we gave up
            self._sock.shutdown(socket.SHUT_RDWR)
        self._finish(Cause("the coordinator", how))

    def _finish(self, cause: Cause | None) -> None:
        with self._lock:
            if self.ended.is_set():
                return
            self.cause = cause
            self.ended.set()
            calls, self._calls = self._calls, []
        self._release()
        with contextlib.ExitStack() as told:  # one that raises keeps no other from being told
            for call in reversed(calls):
                told.callback(call, cause)

    def _release(self) -> None:
        """Calls that still wait for an answer learn that the job is over."""
        with self._lock:
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_exception(self.error())


def _authenticated(address: str, secret: bytes, patience: float, timeout: float) -> socket.socket:
    """A connection to a coordinator that holds ``secret``."""
    sock = connect(address, patience, timeout)
    try:
        handshake.initiate(sock, secret, PURPOSE)
    except BaseException:
        sock.close()
        raise
    return sock


def _answers(topic: str, number: bytes) -> str:
    return f"{topic}, answered {number.hex()}"


def _stats() -> frames.Stats:
    totals = spans.totals()
    steps = max((totals[name].steps for name in ("compute", "update") if name in totals), default=0)
    seconds = {name: max(0.0, total.seconds) for name, total in totals.items()}
    said = scalars.snapshot()
    done = asdict(counters.snapshot())
    return frames.Stats(steps, done, seconds, said.step, said.total, said.samples, dict(said.values))


def _exception(answer: frames.Answer) -> errors.TensorwireError:
    kind = getattr(errors, answer.type, errors.ControlError)
    known = isinstance(kind, type) and issubclass(kind, errors.TensorwireError)
    return kind(answer.error) if known else errors.ControlError(answer.error)


def _seconds(timeout: float) -> float:
    """``timeout`` as it may travel."""
    return min(max(0.0, timeout), frames.MOST_SECONDS)
