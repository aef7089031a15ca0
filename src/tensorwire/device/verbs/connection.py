"""Connecting the two ends of a channel's queue pairs over a socket, and reconnecting them after a refusal.

The control connection carries the target's token, which authenticates the socket. The socket stays open: its end means
the end of the peer. No payload passes.

The initiator asks, and the target answers with the same kind, lane and count: ``TWV1``, kind (u8: 1 all lanes, first; 2
one lane, again), lane (u8, of kind 2), count (u16), receives posted at each (u32), and per queue pair its number (u32),
first packet (u32), LID (u16), GID (16 bytes), port (u8) and MTU (u8: 1 for 256 to 5 for 4096). Integers are
little-endian, except in the queue pairs, which have network order.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorwire._native import Liveness
from tensorwire.device import handshake
from tensorwire.device.acceptor import close_socket
from tensorwire.device.verbs.nic import Nic
from tensorwire.device.verbs.queue_pair import QueuePair, Signals
from tensorwire.errors import PeerLost, ProtocolError

MOST_LANES = 64
_HEAD = struct.Struct("<4sBBHI")  # magic, kind, lane, how many ends follow, receives posted at each
_MAGIC = b"TWV1"
_OPEN, _AGAIN = 1, 2
_END_BYTES = 28  # a queue pair's number, its first packet's, and where its port is
_AGAIN_SECONDS = 30.0


@dataclass(frozen=True)
class QueuePairSettings:
    """What both ends of every queue pair of a device are made with."""

    lanes: int
    signals: Signals
    timeout: int  # an exponent: 4.096 us times 2 to it, for one answer
    retries: int


class Connection:
    """One end of the queue pairs between two devices: the initiator's, or the target's (``inbound``)."""

    def __init__(
        self,
        nic: Nic,
        settings: QueuePairSettings,
        sock: socket.socket,
        liveness: Liveness,
        peer: int,
        *,
        inbound: bool = False,
    ) -> None:
        self.nic, self.liveness, self.peer = nic, liveness, peer
        self._settings = settings
        self._sock = sock
        self._setup = threading.Lock()  # one conversation at a time
        self.inbound = inbound
        self.descriptor = sock.fileno()
        self.lanes: list[QueuePair] = []

    def _make_lanes(self, count: int) -> None:
        for _ in range(count):
            pair = QueuePair(
                self.nic, self.liveness, inbound=self.inbound, signals=self._settings.signals, broken=self._broken
            )
            pair.lost = self.lose
            self.lanes.append(pair)

    # ---- the initiator

    def open(self) -> None:
        """Connects every lane. The socket has a timeout. Raises `PeerLost` or `ProtocolError`."""
        self._make_lanes(self._settings.lanes)
        with self._setup:
            ends = [pair.prepare() for pair in self.lanes]
            self._connect(self.lanes, self._ask(_OPEN, 0, ends))
            self._sock.settimeout(_AGAIN_SECONDS)

    def _ask(self, kind: int, lane: int, ends: Sequence[Any]) -> tuple[list[Any], int]:
        self._send(kind, lane, ends)
        answered, at, theirs, receives = self._receive()
        if (answered, at, len(theirs)) != (kind, lane, len(ends)):
            raise ProtocolError("verbs: the other side sent an unexpected answer")
        return theirs, receives

    def _connect(self, lanes: Sequence[QueuePair], answer: tuple[list[Any], int]) -> None:
        theirs, receives = answer
        for pair, end in zip(lanes, theirs, strict=True):
            pair.connect(end, receives, timeout=self._settings.timeout, retries=self._settings.retries)

    def _broken(self, pair: QueuePair) -> None:
        """A refusal has ended a queue pair; the target waits until the initiator reports it."""
        if not self.inbound:
            threading.Thread(target=self._again, args=(pair,), name="tensorwire-verbs", daemon=True).start()

    def _again(self, pair: QueuePair) -> None:
        lane = next(at for at, each in enumerate(self.lanes) if each is pair)
        with self._setup:
            try:
                pair.reset()
                self._connect([pair], self._ask(_AGAIN, lane, [pair.prepare()]))
            except (OSError, PeerLost, ProtocolError, self.nic.ib.VerbsError) as error:
                self.lose(f"its queue pair could not be made again: {error}")
            if self.liveness.lost or self.nic.liveness.lost:
                pair.destroy()

    # ---- the target

    def serve(self) -> None:
        """Answers until the initiator closes the socket. Raises `PeerLost` then, `ProtocolError` for bad frames."""
        kind, _, theirs, receives = self._receive()
        if kind != _OPEN or not 1 <= len(theirs) <= MOST_LANES:
            raise ProtocolError("verbs: the other side did not begin with its queue pairs")
        self._make_lanes(len(theirs))
        self._answer(_OPEN, 0, self.lanes, theirs, receives)
        self._sock.settimeout(None)
        while True:
            kind, lane, theirs, receives = self._receive()
            if kind != _AGAIN or lane >= len(self.lanes) or len(theirs) != 1:
                raise ProtocolError("verbs: the other side sent an unexpected request")
            self.lanes[lane].reset()
            self._answer(_AGAIN, lane, [self.lanes[lane]], theirs, receives)

    def _answer(self, kind: int, lane: int, pairs: Sequence[QueuePair], theirs: list[Any], receives: int) -> None:
        with self._setup:
            ends = [pair.prepare() for pair in pairs]
            self._connect(pairs, (theirs, receives))
            self._send(kind, lane, ends)

    # ---- frames

    def _send(self, kind: int, lane: int, ends: Sequence[Any]) -> None:
        head = _HEAD.pack(_MAGIC, kind, lane, len(ends), self.lanes[0].receives)
        try:
            self._sock.sendall(head + b"".join(end.to_bytes() for end in ends))
        except OSError as error:
            raise PeerLost(f"verbs: the connection broke: {error}") from None

    def _receive(self) -> tuple[int, int, list[Any], int]:
        magic, kind, lane, count, receives = _HEAD.unpack(handshake.receive_exactly(self._sock, _HEAD.size))
        if magic != _MAGIC or count > MOST_LANES or not 1 <= receives < 2**16:
            raise ProtocolError("verbs: the other side does not speak this version")
        data = handshake.receive_exactly(self._sock, count * _END_BYTES)
        try:
            parts = (data[at : at + _END_BYTES] for at in range(0, len(data), _END_BYTES))
            return kind, lane, [self.nic.ib.QPInfo.from_bytes(part) for part in parts], receives
        except ValueError as error:
            raise ProtocolError(f"verbs: not a queue pair: {error}") from None

    # ---- the end

    def lose(self, reason: str) -> None:
        """The peer is lost: it learns of it, too."""
        self.liveness.lose(reason)
        self._hang_up()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def heartbeat(self) -> None:
        """See ``QueuePair.heartbeat``."""
        for pair in self.lanes:
            with contextlib.suppress(PeerLost):
                pair.heartbeat()

    def destroy(self) -> None:
        """Destroys the queue pairs. When it returns nothing of the peer reaches memory over them. Idempotent."""
        self._hang_up()
        with self._setup:
            for pair in self.lanes:
                pair.destroy()

    def close(self) -> None:
        """``destroy``, and the end of the initiator's socket. Idempotent."""
        self.destroy()
        with self._setup:
            close_socket(self._sock)
