"""Mutual authentication of a fresh connection, before any other byte is believed.

Both sides prove that they hold a secret by HMAC-SHA256 over both nonces and a purpose (which says the role); neither
sends the secret. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import time

from tensorwire.errors import AuthenticationError, PeerLost, ProtocolError

MAGIC = b"TWH1"
NONCE = 32
MOST_PURPOSE = 64


def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """``nbytes`` from a blocking socket, within its timeout as a whole; `PeerLost` if it ends or falls silent."""
    try:
        return _receive(sock, nbytes)
    except TimeoutError as error:
        raise PeerLost(str(error)) from None


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    """The same, but `TimeoutError` if the other side sent nothing for too long, or not enough."""
    timeout = sock.gettimeout()
    end = None if timeout is None else time.monotonic() + timeout
    data = bytearray()
    try:
        while len(data) < nbytes:
            if end is not None:
                sock.settimeout(max(1e-3, end - time.monotonic()))
            part = sock.recv(nbytes - len(data))
            if not part:
                raise PeerLost("the other side closed the connection")
            data += part
        sock.settimeout(timeout)
    except TimeoutError:
        raise TimeoutError(f"the other side of a connection fell silent for {timeout:g} s") from None
    except PeerLost:
        raise
    except OSError as error:
        raise PeerLost(f"the connection broke: {error}") from None
    return bytes(data)


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError as error:
        raise PeerLost(f"the other side closed the connection: {error}") from None


def proof(secret: bytes, side: bytes, purpose: bytes, first: bytes, second: bytes) -> bytes:
    """What ``side`` (accept or initiate) shows: 32 bytes that only a holder of ``secret`` can make for these nonces."""
    return hmac.new(secret, b"|".join((side, purpose, first, second)), hashlib.sha256).digest()


def initiate(sock: socket.socket, secret: bytes, purpose: bytes) -> None:
    """The connecting side. ``sock`` has a timeout. Raises `AuthenticationError`, `PeerLost` or `ProtocolError`."""
    mine = secrets.token_bytes(NONCE)
    _send(sock, MAGIC + bytes([len(purpose)]) + purpose + mine)
    if receive_exactly(sock, len(MAGIC)) != MAGIC:
        raise ProtocolError("the other side does not speak Tensorwire")
    theirs = receive_exactly(sock, NONCE)
    answer = receive_exactly(sock, 32)
    if not hmac.compare_digest(answer, proof(secret, b"accept", purpose, mine, theirs)):
        with contextlib.suppress(PeerLost):
            _send(sock, bytes(32))  # no proof, so that the other side knows why, and learns nothing
        raise AuthenticationError("the other side does not hold this job's secret")
    _send(sock, proof(secret, b"initiate", purpose, theirs, mine))
    try:
        if _receive(sock, 1) != b"\x01":
            raise ProtocolError("the other side does not speak Tensorwire")
    except TimeoutError as error:
        raise PeerLost(str(error)) from None
    except PeerLost:
        raise AuthenticationError("the other side refused this process's secret") from None


def accept(sock: socket.socket, secret: bytes) -> bytes:
    """The accepting side; returns the purpose the initiator authenticated with. ``sock`` has a timeout."""
    if receive_exactly(sock, len(MAGIC)) != MAGIC:
        raise ProtocolError("the other side does not speak Tensorwire")
    size = receive_exactly(sock, 1)[0]
    if size > MOST_PURPOSE:
        raise ProtocolError("the other side sent an oversized greeting")
    purpose = receive_exactly(sock, size)
    theirs = receive_exactly(sock, NONCE)
    mine = secrets.token_bytes(NONCE)
    _send(sock, MAGIC + mine + proof(secret, b"accept", purpose, theirs, mine))
    answer = receive_exactly(sock, 32)
    if not hmac.compare_digest(answer, proof(secret, b"initiate", purpose, mine, theirs)):
        raise AuthenticationError("the other side does not hold this job's secret")
    _send(sock, b"\x01")
    return purpose
