"""A listening socket and the threads that greet connecting peers. Set-up only: no payload passes here.

A connection that has not yet proved that it holds the token is a *stranger*. There are at most ``MOST_STRANGERS`` at a
time, each with a descriptor and a thread; the next one takes the place of the oldest that has sent nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable

from tensorwire import _native
from tensorwire.device import handshake
from tensorwire.errors import PeerLost

MOST_STRANGERS = 64
GREETING_SECONDS = 30.0  # how long a stranger may take for each word
PRESSED_SECONDS = 2.0  # where more than half of the places are taken


class Acceptor:
    """Calls ``greet(socket, purpose)`` for every connection whose other side holds ``token``, each in its own thread.

    Errors there end that connection only. ``listener`` comes from ``open_socket``. ``look(socket)`` may raise before
    the handshake. ``greet`` may detach the socket, and so take it over; otherwise it is closed when ``greet`` returns.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        greet: Callable[[socket.socket, bytes], None],
        name: str,
        *,
        inspect: Callable[[socket.socket], object] | None = None,
    ) -> None:
        self._listener = listener
        self._token = token
        self._greet = greet
        self._inspect = inspect
        self._pid = os.getpid()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._greeted: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, bool] = {}  # oldest first; whether each has said anything
        listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                connection = socket.socket(fileno=_native.accept_socket(self._listener.fileno()))
            except OSError:  # the stranger gave up, or no descriptor is free: do not burn a core meanwhile
                self._stopped.wait(0.05)
                continue
            thread = threading.Thread(target=self._one, args=(connection,), name=self._thread.name, daemon=True)
            with self._lock:
                evicted = self._make_room()
                self._greeted[connection] = thread
                self._strangers[connection] = False
            if evicted is not None:
                evicted.join(1.0)  # otherwise ending threads would pile up
            try:
                thread.start()
            except RuntimeError:  # no more threads
                self._end(connection)

    def _make_room(self) -> threading.Thread | None:
        """Turns a stranger away if there are too many; its thread. The lock is held."""
        if len(self._strangers) < MOST_STRANGERS:
            return None
        silent = (sock for sock, spoke in self._strangers.items() if not spoke and not _has_spoken(sock))
        away = next(silent, None) or next(iter(self._strangers))
        del self._strangers[away]
        with contextlib.suppress(OSError):
            away.shutdown(socket.SHUT_RDWR)
        return self._greeted[away]

    def _one(self, connection: socket.socket) -> None:
        try:
            purpose = self._admit(connection)
            connection.settimeout(GREETING_SECONDS)
            self._greet(connection, purpose)
        except Exception:  # a stranger, a broken frame, a peer that died meanwhile: that connection ends
            pass
        finally:
            self._end(connection)

    def _admit(self, connection: socket.socket) -> bytes:
        """The purpose of a connection that shows the token; from then on it is not a stranger."""
        pressed = len(self._strangers) > MOST_STRANGERS // 2
        connection.settimeout(min(GREETING_SECONDS, PRESSED_SECONDS) if pressed else GREETING_SECONDS)
        if self._inspect is not None:
            self._inspect(connection)
        connection.recv(1, socket.MSG_PEEK)
        with self._lock:
            if connection in self._strangers:
                self._strangers[connection] = True
        purpose = handshake.accept(connection, self._token)
        with self._lock:
            if self._strangers.pop(connection, None) is None:
                raise PeerLost("it was turned away meanwhile")
        return purpose

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            del self._greeted[connection]
            close_socket(connection)

    def close(self) -> None:
        """Stops accepting and greeting; when it returns, every descriptor and thread is gone. Idempotent."""
        if os.getpid() != self._pid:
            return
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)
        with self._lock:
            greeted = list(self._greeted.items())
            for connection, _ in greeted:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for _, thread in greeted:
            if thread is not threading.current_thread():
                thread.join(5.0)
        close_socket(self._listener)


def _has_spoken(sock: socket.socket) -> bool:
    """Whether something of it waits to be read, and it is still there."""
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLRDHUP)
    return any(events == select.POLLIN for _, events in poll.poll(0))


def close_socket(sock: socket.socket) -> None:
    """Closes a socket that a forked child would give up; nothing if it was detached."""
    if sock.fileno() >= 0:
        _native.close_socket(sock.detach())
