"""Admission to the coordinator: mutual authentication of a fresh connection, in its event loop.

This is the accepting side of `tensorwire.device.handshake` without a thread per connection, so a flood of strangers
costs little.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets

from tensorwire.control.names import PURPOSE
from tensorwire.device.handshake import MAGIC, NONCE, proof
from tensorwire.errors import AuthenticationError, ProtocolError

# How long a connection may take to identify itself, how long if more than half of the places are taken, and how many
# may do so at a time. The oldest that has said nothing has to go first.
GREETING_SECONDS = 10.0
PRESSED_SECONDS = 2.0
MOST_STRANGERS = 128


class Authenticator:
    """Admits the connections whose other side holds ``secret``; nothing they send is looked at before."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._strangers: dict[asyncio.StreamWriter, bool] = {}  # oldest first; whether each has greeted

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises `AuthenticationError`, `ProtocolError`, or what a connection that ends or stays silent raises."""
        if len(self._strangers) >= MOST_STRANGERS:
            silent = (stranger for stranger, spoke in self._strangers.items() if not spoke)
            away = next(silent, None) or next(iter(self._strangers))
            del self._strangers[away]
            away.transport.abort()
        pressed = len(self._strangers) > MOST_STRANGERS // 2
        self._strangers[writer] = False
        try:
            seconds = min(GREETING_SECONDS, PRESSED_SECONDS) if pressed else GREETING_SECONDS
            await asyncio.wait_for(self._greet(reader, writer), seconds)
        finally:
            self._strangers.pop(writer, None)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = MAGIC + bytes([len(PURPOSE)]) + PURPOSE
        if await reader.readexactly(len(greeting)) != greeting:
            raise ProtocolError("not a control connection")
        theirs = await reader.readexactly(NONCE)
        if writer in self._strangers:
            self._strangers[writer] = True
        mine = secrets.token_bytes(NONCE)
        writer.write(MAGIC + mine + proof(self._secret, b"accept", PURPOSE, theirs, mine))
        answer = await reader.readexactly(32)
        if not hmac.compare_digest(answer, proof(self._secret, b"initiate", PURPOSE, mine, theirs)):
            raise AuthenticationError("the other side does not hold this job's secret")
        writer.write(b"\x01")
