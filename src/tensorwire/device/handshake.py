"""Mutual authentication of a fresh connection, before any other byte is trusted.

Both sides prove that they hold a secret by HMAC-SHA256 over both nonces and a purpose (which names the role); neither
sends the secret. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import random
import secrets
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from tensorwire.errors import AuthenticationError, PeerLost, ProtocolError

MAGIC = b"TWH1"
NONCE = 32
MOST_PURPOSE = 64


# A process that was turned away asks again, after pauses that double up to the last: four seconds or so in all.
MOST_TRIES = 10
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds

T = TypeVar("T")


class TurnedAway(PeerLost):
    """The other side ended the connection before this one authenticated, such as because strangers flood it."""


def persist(attempt: Callable[[float], T], timeout: float) -> T:
    """Calls ``attempt(seconds)`` until the other side does not turn this process away.

    Args:
        attempt: Connects and authenticates within so many seconds.
        timeout: Seconds for all attempts together.

    Raises:
        PeerLost: If it was turned away each time; and what else ``attempt`` raises.
    """
    end = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    for tries in range(1, MOST_TRIES + 1):
        try:
            return attempt(max(1e-3, end - time.monotonic()))
        except TurnedAway as error:
            if tries == MOST_TRIES or end - time.monotonic() < pause:
                raise PeerLost(str(error)) from None
        time.sleep(random.uniform(pause / 2, pause))  # so that those turned away do not all return at once
        pause = min(2 * pause, _LONGEST_PAUSE)
    raise AssertionError("the last attempt returns or raises")


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
        raise TimeoutError(f"the other side of a connection fell silent for {round(timeout or 0.0, 1):g} s") from None
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
    """The connecting side. ``sock`` has a timeout.

    Raises `AuthenticationError`, `ProtocolError`, or `PeerLost`: as `TurnedAway` where trying again may help.
    """
    try:
        _initiate(sock, secret, purpose)
    except TimeoutError as error:
        raise PeerLost(str(error)) from None
    except PeerLost as error:
        raise TurnedAway(str(error)) from None


def _initiate(sock: socket.socket, secret: bytes, purpose: bytes) -> None:
    mine = secrets.token_bytes(NONCE)
    _send(sock, MAGIC + bytes([len(purpose)]) + purpose + mine)
    if _receive(sock, len(MAGIC)) != MAGIC:
        raise ProtocolError("the other side does not speak Tensorwire")
    theirs = _receive(sock, NONCE)
    answer = _receive(sock, 32)
    if not hmac.compare_digest(answer, proof(secret, b"accept", purpose, mine, theirs)):
        with contextlib.suppress(PeerLost):
            _send(sock, bytes(32))  # no proof, so that the other side knows why, and learns nothing
        raise AuthenticationError("the other side does not hold this job's secret")
    _send(sock, proof(secret, b"initiate", purpose, theirs, mine))
    if _receive(sock, 1) != b"\x01":
        raise ProtocolError("the other side does not speak Tensorwire")


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
