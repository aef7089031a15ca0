"""The devices' wires, by hand: docs/devices.md has the formats."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from tensorwire.device import Channel, Device, LoopbackDevice, ShmDevice, TcpDevice, handshake
from tensorwire.testing.fixtures import Pair
from tensorwire.testing.patterns import SECONDS

DEVICES: dict[str, type[Device]] = {"loopback": LoopbackDevice, "shm": ShmDevice, "tcp": TcpDevice}
CORPUS = Path(__file__).parent / "corpus"

FRAME = struct.Struct("<4sIQQQQQQQ")
WRITE, READ, FETCH_ADD, COMPARE_SWAP, ACK, REFUSE, DATA, OLD_VALUE = 1, 2, 3, 4, 16, 17, 18, 19
NONE = 2**64 - 1


def frame(
    op: int,
    number: int,
    *,
    key: int = 0,
    offset: int = 0,
    length: int = 0,
    signal: tuple[int, int, int] = (0, NONE, 0),
    magic: bytes = b"TWF1",
) -> bytes:
    """The header of docs/devices.md."""
    return FRAME.pack(magic, op, number, key, offset, length, *signal)


def raw_connection(device: Device) -> socket.socket:
    """A connection to the device's listener that has said nothing yet."""
    if isinstance(device, TcpDevice):
        return socket.create_connection((device._address.interface, device._address.port), SECONDS)
    assert isinstance(device, ShmDevice)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(SECONDS)
    try:
        sock.connect(b"\0tensorwire-" + device._name.hex().encode())
    except BaseException:
        sock.close()
        raise
    return sock


def until_end(sock: socket.socket) -> None:
    """Returns when the other side ended the connection."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass


def send_and_end(sock: socket.socket, data: bytes) -> None:
    """Sends, hangs up, and returns when the other side has seen all of it, or ended the connection."""
    with contextlib.suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    until_end(sock)


def check_works(pair: Pair) -> None:
    with pair.target.allocate(16) as region:
        pair.channel.signal(region.remote().view(8, 8), 7).wait(SECONDS)
        region.wait(8, 7, SECONDS)
        with pair.initiator.connect(pair.target.address) as another:
            another.signal(region.remote().view(8, 8), 8).wait(SECONDS)
        region.wait(8, 8, SECONDS)


def authenticated(device: Device) -> socket.socket:
    """A connection to the device that has shown it its token."""
    sock = raw_connection(device)
    if isinstance(device, TcpDevice):
        handshake.initiate(sock, device._token, b"tcp")
    else:
        assert isinstance(device, ShmDevice)
        handshake.initiate(sock, device._token, b"shm")
        exchange_pages(sock)
    return sock


def exchange_pages(sock: socket.socket) -> None:
    """What both ends of shm say behind the handshake; ours: that no page comes."""
    sock.sendall(struct.pack("<II", 0, 1000))
    _, fds, _, _ = socket.recv_fds(sock, 8, 1)
    for fd in fds:
        os.close(fd)


@contextlib.contextmanager
def played(
    device: Device, listener: socket.socket, address: bytes, token: bytes
) -> Iterator[tuple[Channel, socket.socket]]:
    """A channel of the device, and the other end of it, which the test plays by hand."""
    accepted: list[socket.socket] = []

    def accept() -> None:
        sock, _ = listener.accept()
        sock.settimeout(SECONDS)
        accepted.append(sock)
        handshake.accept(sock, token)
        if isinstance(device, ShmDevice):
            exchange_pages(sock)

    thread = threading.Thread(target=accept)
    thread.start()
    channel = device.connect(address, timeout=SECONDS)
    thread.join()
    with accepted[0] as sock, channel:
        yield channel, sock


def corpus(kind: str) -> dict[str, bytes]:
    """What was sent once and is sent again in every run: a file of hexadecimal digits each, with a remark."""
    found = {}
    for path in sorted((CORPUS / kind).glob("*.hex")):
        lines = path.read_text().splitlines()
        found[path.stem] = bytes.fromhex("".join(line for line in lines if not line.startswith("#")))
    assert found, f"no corpus of {kind}"
    return found
