"""Raw connections to a coordinator: what a stranger, or a member that breaks the protocol, would send."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from tensorwire.control import Coordinator, frames
from tensorwire.control.names import PURPOSE
from tensorwire.device import handshake
from tests.control.conftest import SECRET
from tests.harness.sandbox import HANG_SECONDS


@contextlib.contextmanager
def connection(coordinator: Coordinator) -> Iterator[socket.socket]:
    """A fresh connection that has sent nothing."""
    host, _, port = coordinator.address.rpartition(":")
    with socket.create_connection((host, int(port)), HANG_SECONDS) as sock:
        yield sock


@contextlib.contextmanager
def authenticated(coordinator: Coordinator) -> Iterator[socket.socket]:
    """A connection of somebody who holds the secret and has not joined."""
    with connection(coordinator) as sock:
        handshake.initiate(sock, SECRET, PURPOSE)
        yield sock


@contextlib.contextmanager
def joined(coordinator: Coordinator, role: str = "worker", index: int = 0) -> Iterator[socket.socket]:
    """A member's connection, without a `Client` behind it."""
    with authenticated(coordinator) as sock:
        sock.sendall(frames.encode(frames.Join(frames.VERSION, role, index, os.getpid(), "host")))
        assert isinstance(receive(sock), frames.Welcome)
        yield sock


def receive(sock: socket.socket) -> frames.Any:
    """The next message that is not a heartbeat."""
    while True:
        size = frames.body_size(handshake.receive_exactly(sock, frames.HEAD))
        message = frames.decode(handshake.receive_exactly(sock, size))
        if not isinstance(message, frames.Beat):
            return message


def ends(sock: socket.socket) -> bool:
    """Whether the other side closes the connection; False where it has something to say first."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True
