"""Large writes over tcp within one machine: their pages go by reference, and nobody sees what became of them later."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.harness.forked import Forked, receive, send
from wire import WRITE, frame, played

from tensorwire.device import Channel, Region, RemoteRegion, TcpDevice, handshake
from tensorwire.device.tcp import TcpAddress
from tensorwire.errors import PeerLost
from tensorwire.testing.fixtures import InThread
from tensorwire.testing.patterns import HEAD, SECONDS, array, pattern

LEAST = 256 << 10  # from here on they do, if they queue up
SIZES = (LEAST - 1, LEAST, LEAST + 1, (1 << 20) + 4095, (5 << 20) + 8)


@pytest.fixture
def devices() -> Iterator[tuple[TcpDevice, TcpDevice]]:
    with TcpDevice() as source, TcpDevice() as target:
        yield source, target


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def check(channel: Channel, source: Region, inbox: Region) -> None:
    """Writes of all sizes from odd places to odd places, all on their way at once."""
    remote, step = inbox.remote(), inbox.load(0)
    offsets = np.cumsum([HEAD, *SIZES]) + np.arange(len(SIZES) + 1) * 13
    for number, (at, nbytes) in enumerate(zip(offsets, SIZES, strict=False), step + 1):
        array(source)[at + 1 : at + 1 + nbytes] = pattern(number, nbytes)
    for _ in range(2):  # for the others to queue up behind
        channel.write(source.view(HEAD, 8 << 20), remote.view(HEAD, 8 << 20))
    for at, nbytes in zip(offsets, SIZES, strict=False):
        step += 1
        channel.write(source.view(at + 1, nbytes), remote.view(at, nbytes), (remote.view(0, 8), step))
    inbox.wait(0, step, SECONDS)
    for number, (at, nbytes) in enumerate(zip(offsets, SIZES, strict=False), step - len(SIZES) + 1):
        assert (array(inbox)[at : at + nbytes] == pattern(number, nbytes)).all(), nbytes


def test_sizes_and_places(devices: tuple[TcpDevice, TcpDevice]) -> None:
    source, target = devices
    before = descriptors()
    with source.allocate(16 << 20) as memory, target.allocate(16 << 20) as inbox:
        own = descriptors()
        with source.connect(target.address) as channel:
            check(channel, memory, inbox)
            assert descriptors() == own + 4  # two sockets and the pipe
            with source.register(array(memory)[4096:]) as part:
                check(channel, part, inbox)
        while target._engine.connections:
            os.sched_yield()
        assert descriptors() == own
    del memory, inbox, part
    assert descriptors() == before


def test_without_a_descriptor_for_the_pipe(devices: tuple[TcpDevice, TcpDevice]) -> None:
    source, target = devices
    memory, inbox = source.allocate(16 << 20), target.allocate(16 << 20)
    with source.connect(target.address) as channel:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            check(channel, memory, inbox)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        check(channel, memory, inbox)


def serve(pipe: socket.socket) -> None:
    """The target: shows a region, and says what is in it once its only connection is over."""
    with TcpDevice() as device, device.allocate(HEAD + LEAST) as region:
        send(pipe, (device.address, region.remote().pack()))
        receive(pipe)
        end = time.monotonic() + SECONDS
        while device._engine.connections and time.monotonic() < end:
            os.sched_yield()
        send(pipe, (device._engine.connections, region.load(0)))


@pytest.mark.parametrize("reset", [True, False])
def test_a_payload_read_after_a_reset_is_not_signalled(reset: bool) -> None:
    """The target is stopped, a whole payload in its queue; it may have changed there once the sender has given up."""
    with Forked(serve) as peer:
        packed_address, packed = receive(peer.pipe)
        address = msgspec.msgpack.decode(packed_address, type=TcpAddress)
        key = RemoteRegion.unpack(packed).key
        with socket.create_connection((address.interface, address.port), SECONDS) as sock:
            handshake.initiate(sock, address.token, b"tcp")
            sock.sendall(frame(WRITE, 1, key=key, offset=HEAD, length=8) + bytes(8))
            handshake.receive_exactly(sock, 64)
            peer.stop()
            sock.sendall(frame(WRITE, 2, key=key, offset=HEAD, length=LEAST, signal=(key, 0, 1)) + bytes(LEAST))
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.resume()
        send(peer.pipe, "the end")
        assert receive(peer.pipe) == (0, int(not reset))


@pytest.mark.parametrize("how", ["channel", "device", "abort"])
@pytest.mark.parametrize("lent", ["alone", "queued", ""])
def test_who_ends_a_channel_takes_back_what_it_lent(how: str, lent: str) -> None:
    """The other end, played by hand, reads nothing until then."""
    with socket.create_server(("127.0.0.1", 0)) as listener, TcpDevice() as device:
        address = msgspec.msgpack.encode(TcpAddress("127.0.0.1", listener.getsockname()[1], b"t"))
        with played(device, listener, address, b"t") as (channel, sock):
            memory, remote = device.allocate(64 << 20), RemoteRegion("tcp", 1, 64 << 20, "write")
            private = device.register(bytearray(64 << 20))  # its pages are nobody's to lend
            first = channel.write((memory if lent == "alone" else private).view(), remote.view())
            if lent == "queued":
                channel.write(memory.view(0, LEAST), remote.view(0, LEAST))
            if how == "abort":
                device.abort("the job has ended")
            else:
                (channel if how == "channel" else device).close()
            with pytest.raises(PeerLost):
                first.wait(SECONDS)
            ended = ""
            try:
                while sock.recv(1 << 20):
                    pass
            except ConnectionResetError:
                ended = "reset"
            assert ended == ("reset" if lent else "")


def sockets() -> int:
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of such a listing, maybe another thread's
            found += str(fd.readlink()).startswith("socket:")
    return found


def test_either_of_two_who_close_has_taken_it_back(in_thread: InThread) -> None:
    """Whose close() returned may reuse the memory at once, though it was the other's that did the work."""
    with socket.create_server(("127.0.0.1", 0)) as listener, TcpDevice() as device:
        address = msgspec.msgpack.encode(TcpAddress("127.0.0.1", listener.getsockname()[1], b"t"))
        memory, remote = device.allocate(4 << 20), RemoteRegion("tcp", 1, 4 << 20, "write")
        for _ in range(50):
            with played(device, listener, address, b"t") as (channel, _):
                for _ in range(3):
                    channel.write(memory.view(), remote.view())
                before = sockets()
                both, after = threading.Barrier(2), list[int]()

                def close(channel=channel, both=both, after=after) -> None:  # type: ignore[no-untyped-def]
                    both.wait(SECONDS)
                    channel.close()
                    after.append(sockets())

                for thread in [in_thread(close) for _ in range(2)]:
                    thread.join(SECONDS)
                assert after == [before - 1] * 2  # it went with what it had lent
