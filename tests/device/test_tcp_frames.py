"""The tcp engine against hostile or strange frames: that connection ends, memory stays, others go on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import (
    ACK,
    DATA,
    FRAME,
    NONE,
    READ,
    REFUSE,
    WRITE,
    authenticated,
    check_works,
    frame,
    played,
)

from tensorwire.device import Channel, Region, TcpDevice, handshake
from tensorwire.device import tcp as tcp_module
from tensorwire.device.tcp import TcpAddress
from tensorwire.errors import PeerLost, RemoteAccessError, WaitTimeout
from tensorwire.testing.fixtures import SEEDED, InThread, Pair
from tensorwire.testing.patterns import SECONDS, array, pattern
from tensorwire.testing.spec import DeviceSpec


@pytest.fixture
def spec() -> DeviceSpec:
    return DeviceSpec("tensorwire.device:TcpDevice")


def target(pair: Pair) -> TcpDevice:
    assert isinstance(pair.target, TcpDevice)
    return pair.target


def exposed(pair: Pair) -> Region:
    region = pair.target.allocate(4096)
    array(region)[:] = pattern(9, 4096)
    return region


def test_frames_may_arrive_in_any_pieces(pair: Pair) -> None:
    region = pair.target.allocate(1 << 18)
    key, room = region.remote().key, array(region)

    @settings(SEEDED, max_examples=40)
    @given(data=st.data(), sizes=st.lists(st.sampled_from([0, 1, 7, 64, 100, 70_000, 200_000]), min_size=1, max_size=6))
    def check(data: st.DataObject, sizes: list[int]) -> None:
        room[:] = 0
        stream, want = b"", b""
        for number, nbytes in enumerate(sizes, 1):
            payload = pattern(number, nbytes).tobytes()
            stream += frame(WRITE, number, key=key, offset=8, length=nbytes, signal=(key, 0, number)) + payload
            want = payload + want[nbytes:]
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
        with authenticated(target(pair)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
                sock.sendall(stream[start:stop])
            done = 0
            while done < len(sizes):
                _, op, done, *rest = FRAME.unpack(handshake.receive_exactly(sock, 64))
                assert (op, rest) == (ACK, [0, 0, 0, 0, NONE, 0])
        assert region.load(0) == len(sizes)
        assert room[8 : 8 + len(want)].tobytes() == want
        assert not room[8 + len(want) :].any()

    check()


# ---- the initiator against a hostile target


@pytest.fixture
def hostile() -> Iterator[tuple[TcpDevice, Channel, socket.socket]]:
    """A device, its channel, and the other end of it, which the test plays by hand."""
    with socket.create_server(("127.0.0.1", 0)) as listener, TcpDevice() as device:
        address = msgspec.msgpack.encode(TcpAddress("127.0.0.1", listener.getsockname()[1], b"t"))
        with played(device, listener, address, b"t") as (channel, sock):
            yield device, channel, sock


def test_an_honest_target_played_by_hand(hostile: tuple[TcpDevice, Channel, socket.socket]) -> None:
    device, channel, sock = hostile
    mine = device.allocate(16)
    there = mine.remote()
    writes = [channel.write(mine.view(), there.view(), (there.view(0, 8), 3)), channel.signal(there.view(8, 8), 4)]
    read = channel.read(mine.view(8, 8), there.view(0, 8))
    first = frame(WRITE, 1, key=there.key, length=16, signal=(there.key, 0, 3)) + bytes(16)
    second = frame(WRITE, 2, offset=NONE, signal=(there.key, 8, 4))
    third = frame(READ, 3, key=there.key, length=8)
    sent = first + second + third
    assert handshake.receive_exactly(sock, len(sent)) == sent
    with pytest.raises(WaitTimeout):
        writes[0].wait(0.0)
    sock.sendall(frame(REFUSE, 1, key=3) + frame(ACK, 2) + frame(DATA, 3, length=8) + b"answered")
    read.wait(SECONDS)
    writes[1].wait(SECONDS)
    with pytest.raises(RemoteAccessError, match="read-only"):
        writes[0].wait(SECONDS)
    assert bytes(mine.view().buffer) == bytes(8) + b"answered"


def test_a_full_channel_waits_and_then_says_so(
    hostile: tuple[TcpDevice, Channel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, channel, sock = hostile
    monkeypatch.setattr(tcp_module, "_POST_SECONDS", 0.05)
    word = device.allocate(8).remote().view()
    completions = [channel.signal(word, i) for i in range(4096)]
    for _ in range(2):
        with pytest.raises(WaitTimeout, match="not started"):
            channel.signal(word, 1)
    handshake.receive_exactly(sock, 4096 * 64)
    sock.sendall(frame(ACK, 4096))
    completions[-1].wait(SECONDS)
    assert all(completion.done for completion in completions)
    last = channel.signal(word, 9)
    assert handshake.receive_exactly(sock, 64) == frame(WRITE, 4097, offset=NONE, signal=(word.region.key, 0, 9))
    sock.sendall(frame(ACK, 4097))
    last.wait(SECONDS)


def test_a_full_channel_goes_on_when_there_is_room(
    hostile: tuple[TcpDevice, Channel, socket.socket], in_thread: InThread
) -> None:
    device, channel, sock = hostile
    word = device.allocate(8).remote().view()

    def acknowledge() -> None:
        for i in range(1, 10_001):
            handshake.receive_exactly(sock, 64)
            if i % 100 == 0:
                sock.sendall(frame(ACK, i))

    thread = in_thread(acknowledge)
    for i in range(10_000):
        completion = channel.signal(word, i)
    completion.wait(SECONDS)
    thread.join()


def test_closing_a_full_channel_ends_who_waits_for_room(
    hostile: tuple[TcpDevice, Channel, socket.socket], in_thread: InThread
) -> None:
    device, channel, sock = hostile
    word = device.allocate(8).remote().view()

    def fill() -> None:
        for i in range(4096):
            channel.signal(word, i)
        with pytest.raises(PeerLost):
            channel.signal(word, 1)

    thread = in_thread(fill)
    handshake.receive_exactly(sock, 4096 * 64)
    channel.close()
    thread.join()


def test_closing_a_channel_gives_its_memory_back(hostile: tuple[TcpDevice, Channel, socket.socket]) -> None:
    device, channel, _ = hostile
    source, destination = bytearray(8 << 20), bytearray(8)
    there = device.allocate(8).remote()
    forged = type(there)("tcp", 1, 8 << 20, "write")
    write = channel.write(device.register(source).view(), forged.view())
    read = channel.read(device.register(destination).view(), there.view())
    channel.close()
    for completion in (write, read):
        with pytest.raises(PeerLost):
            completion.wait(SECONDS)
    del write, read, completion
    source.append(0)  # a buffer that is still in use cannot grow
    destination.append(0)


def test_many_replies_do_not_stop_a_slow_reader(pair: Pair) -> None:
    key = exposed(pair).remote("read").key
    with authenticated(target(pair)) as sock:
        requests = b"".join(frame(READ, number, key=key, length=4096) for number in range(1, 5001))

        def send() -> None:
            sock.sendall(requests)

        thread = threading.Thread(target=send)
        thread.start()
        want = pattern(9, 4096).tobytes()
        for number in range(1, 5001):
            assert handshake.receive_exactly(sock, 64 + 4096) == frame(DATA, number, length=4096) + want
        thread.join()
    check_works(pair)
