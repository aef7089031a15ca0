"""Counts what crosses a network card: the payload of RDMA writes, exactly, and that of tcp.

RoCEv2 is an InfiniBand packet in UDP, port 4791: annex A17 of the InfiniBand specification; heads: chapter 9.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter

ROCE_PORT = 4791
BASE, CHECK = 12, 4  # bytes of every packet's head, and of the sum at its end
# Opcodes of reliable-connected writes, and the bytes of further heads: address and key, immediate data.
WRITES = {0x06: 16, 0x07: 0, 0x08: 0, 0x09: 4, 0x0A: 16, 0x0B: 20}
SOL_PACKET, PACKET_STATISTICS = 263, 6
_ALL = 0x0003  # every protocol, both ways
_ROOM = 32 << 20
_HEAD = 256  # more than all heads together


class Capture:
    """Watches a card while it is active. ``bytes`` is by what ("roce" or "tcp") and by direction ("out" or "in")."""

    def __init__(self, interface: str) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.lost = 0  # packets that came too fast to be counted
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, 33, _ROOM)  # SO_RCVBUFFORCE
        self._socket.bind((interface, _ALL))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Capture:
        self._socket.settimeout(0.1)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.lost = struct.unpack("II", self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[1]
        self._socket.close()

    def _run(self) -> None:
        """Until it was told to stop and nothing more is there."""
        while True:
            try:
                packet, (_, protocol, kind, *_) = self._socket.recvfrom(_HEAD)
            except TimeoutError:
                if self._stop.is_set():
                    return
                continue
            if protocol == 0x0800:
                found = payload(packet)
                if found is not None:
                    self.bytes[found[0], "out" if kind == socket.PACKET_OUTGOING else "in"] += found[1]


def payload(packet: bytes) -> tuple[str, int] | None:
    """What an IPv4 packet carries, and how much of it: RDMA writes or tcp."""
    head = 4 * (packet[0] & 15)
    (total,) = struct.unpack_from(">H", packet, 2)
    kind, rest = packet[9], packet[head:]
    if kind == socket.IPPROTO_TCP:
        return "tcp", total - head - 4 * (rest[12] >> 4)
    if kind == socket.IPPROTO_UDP and struct.unpack_from(">H", rest, 2)[0] == ROCE_PORT:
        opcode, pad = rest[8], rest[9] >> 4 & 3
        if opcode in WRITES:
            return "roce", total - head - 8 - BASE - WRITES[opcode] - CHECK - pad
    return None
