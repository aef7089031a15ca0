"""What strangers and broken peers send over the set-up connection ends that connection, and nothing else."""

from __future__ import annotations

import contextlib
import os
import random
import socket

import msgspec
import pytest

from tensorwire.device import VerbsDevice, handshake
from tensorwire.device.verbs.connection import _HEAD, _MAGIC
from tensorwire.device.verbs.device import _PURPOSE, _TERMS, VerbsAddress
from tensorwire.errors import ArgumentError, AuthenticationError, PeerLost, TensorwireError
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
        until_hung_up(sock)


def until_hung_up(sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass


def frame(kind: int = 1, lane: int = 0, count: int = 1, receives: int = 32, ends: bytes = END) -> bytes:
    return _HEAD.pack(_MAGIC, kind, lane, count, receives) + ends


def test_broken_frames() -> None:
    bad = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        frame()[:-1],
        frame(count=0, ends=b""),
        frame(count=65, ends=65 * END),
        frame(count=2**16 - 1),
        frame(kind=2),
        frame(kind=77),
        frame(receives=0),
        frame(receives=2**31),
        frame(ends=END[:-1] + b"\x06"),  # an MTU that does not exist
        frame(ends=END[:-2] + b"\x00\x05"),  # port 0
        frame(ends=b"\xff" * 28),
        frame() + frame(kind=2, lane=1),
        frame() + frame(kind=2, count=2, ends=2 * END),
        frame() + frame(kind=1),
    ]
    with VerbsDevice("rxa", interface=ADDRESSES[0]) as device:
        for data in bad:
            check_hung_up(device, data)
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


def test_strangers() -> None:
    with VerbsDevice("rxa", interface=ADDRESSES[0]) as device, VerbsDevice("rxb", interface=ADDRESSES[1]) as other:
        where = msgspec.msgpack.decode(device.address, type=VerbsAddress)
        stranger = msgspec.structs.replace(where, token=os.urandom(32))
        with pytest.raises((AuthenticationError, PeerLost)):
            other.connect(msgspec.msgpack.encode(stranger))
        elsewhere = msgspec.structs.replace(where, kind="tcp")
        with pytest.raises(ArgumentError, match="verbs"):
            other.connect(msgspec.msgpack.encode(elsewhere))
        with socket.create_connection((where.interface, where.port), SECONDS) as sock:
            sock.sendall(b"\0" * 100)
            until_hung_up(sock)
        check_alive(device)


def test_a_target_that_answers_nonsense() -> None:
    """The initiator's side of the same: connect() ends with an error of ours, and leaves nothing."""
    with socket.create_server((ADDRESSES[1], 0)) as listener, VerbsDevice("rxa", interface=ADDRESSES[0]) as device:
        token = os.urandom(32)
        address = VerbsAddress(ADDRESSES[1], listener.getsockname()[1], token, "verbs")
        for answer in (b"", b"x" * 40, frame(kind=2), frame(count=2, ends=2 * END), frame(ends=b"\xff" * 28)):
            pid = os.fork()
            if pid == 0:
                sock = listener.accept()[0]
                handshake.accept(sock, token)
                sock.recv(4096)
                sock.sendall(answer)
                os._exit(0)
            with pytest.raises(TensorwireError):
                device.connect(msgspec.msgpack.encode(address))
            os.waitpid(pid, 0)
        check_alive(device)
