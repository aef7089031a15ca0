"""What strangers and broken peers send over the set-up connection ends that connection, and nothing else."""

from __future__ import annotations

import contextlib
import random
import socket

import msgspec

from tensorwire.device import VerbsDevice, handshake
from tensorwire.device.verbs.connection import _HEAD, _MAGIC
from tensorwire.device.verbs.device import _PURPOSE, _TERMS, VerbsAddress
from tensorwire.testing.patterns import SECONDS
from tests.rdma.wire import ADDRESSES

END = bytes(8) + bytes(2) + bytes(16) + b"\x01\x05"  # queue pair 0 on port 1, which no peer has


def admitted(device: VerbsDevice) -> socket.socket:
    """A connection of somebody who holds the token."""
    where = msgspec.msgpack.decode(device.address, type=VerbsAddress)
    sock = socket.create_connection((where.interface, where.port), SECONDS)
    handshake.initiate(sock, where.token, _PURPOSE + _TERMS.pack(7))
    return sock


def check_alive(device: VerbsDevice) -> None:
    with VerbsDevice("rxb", interface=ADDRESSES[1]) as other, other.connect(device.address) as channel:
        region = device.allocate(8)
        channel.signal(region.remote().view(), 3).wait(SECONDS)
        region.wait(0, 3, SECONDS)


def check_hung_up(device: VerbsDevice, data: bytes) -> None:
    with admitted(device) as sock:
        with contextlib.suppress(OSError):  # it may have hung up at the first bad byte, while we still sent
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass


def frame(kind: int = 1, lane: int = 0, count: int = 1, receives: int = 32, ends: bytes = END) -> bytes:
    return _HEAD.pack(_MAGIC, kind, lane, count, receives) + ends


def test_ends_that_no_nic_takes() -> None:
    """An MTU that does not exist, port 0, and noise."""
    with VerbsDevice("rxa", interface=ADDRESSES[0]) as device:
        for ends in (END[:-1] + b"\x06", END[:-2] + b"\x00\x05", b"\xff" * 28):
            check_hung_up(device, frame(ends=ends))
        check_alive(device)


def test_random_frames() -> None:
    chance = random.Random(11)
    with VerbsDevice("rxa", interface=ADDRESSES[0]) as device:
        for _ in range(40):
            data = bytearray(frame(count=2, ends=2 * END))
            for _ in range(chance.randint(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            check_hung_up(device, bytes(data[: chance.choice((len(data), chance.randrange(len(data))))]))
        check_alive(device)
