"""A process's one connection to the coordinator."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from tensorwire import errors
from tensorwire._native import Pulse, close_on_fork, forget_fd
from tensorwire.control import frames
from tensorwire.control.coordinator import PURPOSE, member_name
from tensorwire.control.frames import Cause
from tensorwire.device import handshake
from tensorwire.errors import ArgumentError, JobEnded, PeerLost, ProtocolError
from tensorwire.observe import counters

_SLACK = 5.0  # the coordinator's own timeout comes first, with the better message


class Client:
    """Joins a job and speaks for one member. Heartbeats come from a native thread, whatever Python does.

    ``address`` is ``HOST:PORT``. Raises `AuthenticationError`, `ProtocolError` (no such member, joined twice) or
    `PeerLost` (nobody listens there).
    """

    def __init__(self, address: str, secret: bytes, role: str, index: int, *, timeout: float = 60.0) -> None:
        self.name = member_name(role, index)
        self.cause: Cause | None = None
        self.ended = threading.Event()
        self._calls: list[Callable[[Cause | None], None]] = []
        self._ids = itertools.count(1)
        self._pending: dict[int, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._sock = _connect(address, timeout)
        try:
            handshake.initiate(self._sock, secret, PURPOSE)
            join = frames.Join(frames.VERSION, role, index, os.getpid(), socket.gethostname())
            self._sock.sendall(frames.encode(join))
            welcome = self._receive()
        except BaseException:
            self._sock.close()
            raise
        if isinstance(welcome, frames.Answer):
            self._sock.close()
            raise ProtocolError(welcome.error)
        if not isinstance(welcome, frames.Welcome):
            self._sock.close()
            raise ProtocolError("the coordinator did not answer the join")
        self.welcome = welcome
        self._sock.settimeout(welcome.lost_after)
        close_on_fork(self._sock.fileno())
        self._pulse = Pulse(self._sock.fileno(), frames.encode(frames.Beat()), welcome.beat)
        self._thread = threading.Thread(target=self._listen, name="tensorwire-control", daemon=True)
        self._thread.start()

    # ---- requests: each is an RPC

    def publish(self, key: str, value: bytes, to: list[str] | None = None) -> None:
        """Puts ``value`` into the address book, for all or for the members named."""
        self._request(frames.Publish(next(self._ids), key, value, to), 60.0)

    def lookup(self, key: str, timeout: float = 60.0) -> bytes:
        """The value published under ``key``; waits for it. Raises `WaitTimeout`."""
        return self._request(frames.Lookup(next(self._ids), key, timeout), timeout)

    def barrier(self, name: str, parties: int, timeout: float = 600.0) -> None:
        """Returns when ``parties`` members have come here. Raises `WaitTimeout`, naming who came."""
        self._request(frames.Barrier(next(self._ids), name, parties, timeout), timeout)

    def compare(self, name: str, digest: bytes, text: str, parties: int, timeout: float = 600.0) -> None:
        """Returns when ``parties`` members have shown the same digest; else ends the job with `PlanMismatch`."""
        text = text if len(text) < frames.MOST_BYTES // 2 else text[: frames.MOST_BYTES // 2] + "\n..."
        self._request(frames.Compare(next(self._ids), name, digest, text, parties, timeout), timeout)

    def _request(self, message: frames.Publish | frames.Lookup | frames.Barrier | frames.Compare, timeout: float) -> bytes:
        counters.rpcs += 1
        future: Future[bytes] = Future()
        with self._lock:
            if self.ended.is_set():
                raise self.error()
            self._pending[message.id] = future
        self._send(message)
        try:
            return future.result(timeout + _SLACK)
        except FutureTimeout:
            raise errors.WaitTimeout(f"the coordinator did not answer within {timeout + _SLACK:g} s") from None
        finally:
            self._pending.pop(message.id, None)

    # ---- news

    def fail(self, cause: Cause) -> None:
        """Reports a failure, which ends the job for everybody."""
        self._send(frames.Fail(cause))

    def report_exit(self, role: str, index: int, status: int) -> None:
        """For launchers: how a process of this machine ended."""
        self._send(frames.Left(role, index, status))

    def on_end(self, call: Callable[[Cause | None], None]) -> None:
        """Calls ``call(cause)`` from the control thread when the job ends; at once if it has."""
        with self._lock:
            if not self.ended.is_set():
                self._calls.append(call)
                return
        call(self.cause)

    def error(self) -> JobEnded:
        """The job's end as an exception."""
        return JobEnded(str(self.cause) if self.cause else "the job has ended")

    def leave(self) -> None:
        """Says goodbye and closes. Idempotent."""
        self.close(goodbye=True)

    def close(self, *, goodbye: bool = False) -> None:
        """Closes the connection; without a goodbye the coordinator takes it for a death. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if goodbye:
            self._pulse.send(frames.encode(frames.Bye()), 5.0)
        self._pulse.close()
        forget_fd(self._sock.fileno())
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._sock.close()

    # ---- the connection

    def _send(self, message: frames.Message) -> None:
        error = self._pulse.send(frames.encode(message), self.welcome.lost_after)
        if error and not self._closed:
            self._finish(Cause("the coordinator", f"cannot be reached: {os.strerror(error)}"))

    def _receive(self) -> frames.Any:
        size = frames.body_size(handshake.receive_exactly(self._sock, frames.HEAD))
        return frames.decode(handshake.receive_exactly(self._sock, size))

    def _listen(self) -> None:
        try:
            while True:
                message = self._receive()
                if isinstance(message, frames.Answer):
                    self._settle(message)
                elif isinstance(message, frames.End):
                    self._finish(message.cause)
        except (PeerLost, ProtocolError, OSError) as error:
            if not self._closed and not self.ended.is_set():
                self._finish(Cause("the coordinator", f"is gone: {error}"))

    def _settle(self, answer: frames.Answer) -> None:
        future = self._pending.pop(answer.id, None)
        if future is None:
            return
        if not answer.error:
            future.set_result(answer.value)
        elif answer.type == "JobEnded":
            future.set_exception(JobEnded(answer.error) if self.cause is None else self.error())
        else:
            future.set_exception(getattr(errors, answer.type, errors.ControlError)(answer.error))

    def _finish(self, cause: Cause | None) -> None:
        with self._lock:
            if self.ended.is_set():
                return
            self.cause = cause
            self.ended.set()
            calls, self._calls = self._calls, []
            pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(self.error())
        for call in calls:
            call(cause)


def split_address(address: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[V6]:PORT``. Raises `ArgumentError`."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise ArgumentError(f"an address is HOST:PORT, not {address!r}")
    return host, int(port)


def _connect(address: str, timeout: float) -> socket.socket:
    import time

    host, port = split_address(address)
    end = time.monotonic() + timeout
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=max(0.1, end - time.monotonic()))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except (ConnectionRefusedError, TimeoutError) as error:
            # The coordinator may still be starting: on several machines nobody orders the starts.
            if time.monotonic() > end:
                raise PeerLost(f"no coordinator answers at {address} ({error}): is the job running there?") from None
            time.sleep(0.05)
        except OSError as error:
            raise PeerLost(f"cannot reach the coordinator at {address}: {error}") from None
