"""Watches a process of this machine over a Unix socket: its death, its silence, and the end of its last thread.

Three signs complement each other. The kernel marks a word of the peer's page when the peer dies, before it frees the
peer's memory (`DeathNotifier`). It hangs up the socket when the peer closes it (`Monitor`). The page's counter stands
still while the peer is stopped.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct

from tensorwire._native import DeathNotifier, Liveness, Monitor, close_on_fork, forget_fd
from tensorwire.errors import ArgumentError, OutOfMemory, PeerLost, ProtocolError

_HELLO = struct.Struct("<II")  # the word for this peer in our page (0: no page comes), milliseconds between beats


def check_heartbeat(heartbeat: float, lost_after: float) -> None:
    """Both in seconds. Raises `ArgumentError`."""
    if not 0.001 <= heartbeat <= 3600 or not 2 * heartbeat <= lost_after <= 1e6:
        raise ArgumentError("heartbeat must be 0.001 to 3600 seconds, and lost_after at least twice that")


def milliseconds(heartbeat: float) -> int:
    """As peers receive it: rounded up, so that they never expect too many beats."""
    return int(-(-heartbeat * 1000 // 1))


class Watchers:
    """The native threads of one device, which watch all its peers. Raises `OutOfMemory`."""

    def __init__(self, heartbeat: float, lost_after: float) -> None:
        check_heartbeat(heartbeat, lost_after)
        self.heartbeat = heartbeat
        self.monitor = Monitor()
        try:
            self.death_notifier = DeathNotifier(heartbeat, lost_after)
        except OSError as error:
            self.monitor.close()
            raise OutOfMemory(f"cannot make a page of memory to share with peers: {error.args[1]}") from None

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self.monitor.close()
        self.death_notifier.close()


class PeerMonitor:
    """Ends ``liveness`` when the process at the other end of ``sock`` dies, hangs up or falls silent.

    Both ends make one, right after the handshake. A loss is mutual: it ends the connection, so that a peer that was
    only stopped learns of it. Raises `PeerLost` or `ProtocolError`.
    """

    def __init__(self, watchers: Watchers, sock: socket.socket, liveness: Liveness) -> None:
        self._watchers = watchers
        self._fd = sock.fileno()
        self._word = watchers.death_notifier.enter(liveness, self._fd)
        try:
            self._greet(sock)
            watchers.monitor.watch(self._fd, liveness)
        except BaseException:
            watchers.death_notifier.leave(self._word)
            raise

    def _greet(self, sock: socket.socket) -> None:
        death_notifier = self._watchers.death_notifier
        hello = _HELLO.pack(self._word, milliseconds(self._watchers.heartbeat))
        try:
            socket.send_fds(sock, [hello], [death_notifier.fd] if self._word else [])
            answer, fds, _, _ = socket.recv_fds(sock, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise PeerLost(f"the other process did not say how to watch it: {error}") from None
        try:
            if len(answer) != _HELLO.size:
                raise PeerLost("the other process closed the connection")
            word, beat = _HELLO.unpack(answer)
            if self._word and word and fds:
                death_notifier.watch(self._word, fds[0], word, beat / 1000)
        except OSError as error:
            if isinstance(error, PeerLost):
                raise
            raise ProtocolError(f"the other process sent no page of words: {error.args[1]}") from None
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Before the socket is closed."""
        self._watchers.monitor.forget(self._fd)
        self._watchers.death_notifier.leave(self._word)


class ProcessHandle:
    """A process of this machine, to wait until its last thread has ended."""

    def __init__(self, pid: int) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):  # of another pid namespace, or a kernel before 5.3
            self._fd = os.pidfd_open(pid)
            close_on_fork(self._fd)

    def gone(self, timeout: float) -> bool:
        """Whether the process ended within ``timeout`` seconds; False as well where this cannot be known."""
        if self._fd < 0:
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout) * 1000))

    def close(self) -> None:
        """Gives the descriptor back. Idempotent."""
        if self._fd >= 0:
            forget_fd(self._fd)
            os.close(self._fd)
            self._fd = -1
