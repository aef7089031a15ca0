"""A listening socket and the threads that greet whoever connects. Set-up only: no payload passes here."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

from tensorwire import _native

_GREETING_SECONDS = 30.0


class Acceptor:
    """Calls ``greet(socket)`` for every connection, each in its own thread; errors there end that connection only.

    ``listener`` comes from ``open_socket``.

    ``greet`` may detach the socket, and so take it over; otherwise it is closed when ``greet`` returns.
    """

    def __init__(self, listener: socket.socket, greet: Callable[[socket.socket], None], name: str) -> None:
        self._listener = listener
        self._greet = greet
        self._pid = os.getpid()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._greeted: dict[socket.socket, threading.Thread] = {}
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
                self._greeted[connection] = thread
            try:
                thread.start()
            except RuntimeError:  # no more threads
                self._end(connection)

    def _one(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_GREETING_SECONDS)
            self._greet(connection)
        except Exception:  # a stranger, a broken frame, a peer that died meanwhile: that connection ends
            pass
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            del self._greeted[connection]
            close_socket(connection)

    def close(self) -> None:
        """Stops accepting and greeting; when it returns, every descriptor and thread is gone. Idempotent."""
        if os.getpid() != self._pid or self._stopped.is_set():
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


def close_socket(sock: socket.socket) -> None:
    """Closes a socket that a forked child would give up; nothing if it was detached."""
    if sock.fileno() >= 0:
        _native.close_socket(sock.detach())
