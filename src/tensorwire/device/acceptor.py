"""A listening socket and the threads that greet whoever connects. Set-up only: no payload passes here."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

from tensorwire._native import close_on_fork, forget_fd


class Acceptor:
    """Calls ``greet(socket)`` for every connection, each in its own thread; errors there end that connection only."""

    def __init__(self, listener: socket.socket, greet: Callable[[socket.socket], None], name: str) -> None:
        self._listener = listener
        self._greet = greet
        self._pid = os.getpid()
        self._stopped = False
        close_on_fork(listener.fileno())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._stopped:
                    return
                continue
            threading.Thread(target=self._one, args=(connection,), name=self._thread.name, daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        try:
            self._greet(connection)
        except Exception:  # a stranger, a broken frame, a peer that died meanwhile: that connection ends
            connection.close()

    def close(self) -> None:
        """Stops accepting. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        if os.getpid() != self._pid:
            return
        forget_fd(self._listener.fileno())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)
        self._listener.close()
