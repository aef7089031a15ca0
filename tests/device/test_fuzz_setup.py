"""Everything but frames that strangers may send: addresses, greetings, capabilities, questions for descriptors."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import authenticated, check_works, corpus, played, raw_connection, send_and_end, until_end

from tensorwire._native import Memory
from tensorwire.device import LoopbackDevice, RemoteRegion, ShmDevice, TcpDevice, handshake
from tensorwire.device.tcp import TcpAddress
from tensorwire.errors import (
    ArgumentError,
    AuthenticationError,
    PeerLost,
    ProtocolError,
    RemoteAccessError,
    TensorwireError,
)
from tensorwire.testing.fixtures import SEEDED, Pair
from tensorwire.testing.patterns import SECONDS, array, pattern
from tensorwire.testing.spec import DeviceSpec

SECRET = b"s" * 32
BOTH, READS, CLOSED = 0x1122334455667788, 0x8877665544332211, 0x5555
ASK = struct.Struct("<QB")
REFUSED = (ArgumentError, AuthenticationError, PeerLost, ProtocolError)

# ---- addresses


def check_address(kind: type[TcpDevice] | type[ShmDevice] | type[LoopbackDevice], address: bytes) -> None:
    """Nobody is there: a typed error, and the device works on."""
    with kind() as device:
        with pytest.raises(REFUSED):
            device.connect(address, timeout=1.0)
        with device.connect(device.address) as channel:
            region = device.allocate(8)
            channel.signal(region.remote().view(), 1).wait(SECONDS)


@pytest.mark.parametrize("name", corpus("tcp-addresses"))
def test_the_corpus_of_tcp_addresses(name: str) -> None:
    check_address(TcpDevice, corpus("tcp-addresses")[name])


@pytest.mark.parametrize("name", corpus("shm-addresses"))
def test_the_corpus_of_shm_addresses(name: str) -> None:
    check_address(ShmDevice, corpus("shm-addresses")[name])


def leads_to(address: bytes, good: bytes) -> bool:
    """Whether only the milliseconds between signs of life differ, which are the peer's own affair."""
    try:
        return bool(msgspec.msgpack.decode(address)[:3] == msgspec.msgpack.decode(good)[:3])
    except (msgspec.DecodeError, ValueError, TypeError, LookupError):
        return False


@pytest.mark.parametrize("kind", [TcpDevice, ShmDevice, LoopbackDevice])
def test_any_bytes_as_an_address(kind: type[TcpDevice]) -> None:
    with kind() as device, kind() as other:
        good = other.address
        damaged = st.tuples(st.integers(0, len(good) - 1), st.integers(1, 255)).map(
            lambda change: good[: change[0]] + bytes([good[change[0]] ^ change[1]]) + good[change[0] + 1 :]
        )
        shorter = st.integers(0, len(good) - 1).map(lambda end: good[:end])
        # A damaged interface might be the address of a real machine: those are left alone.
        interface = range(1, 2 + len(msgspec.msgpack.decode(good)[0])) if kind is TcpDevice else range(0)

        @settings(SEEDED, max_examples=120)
        @given(st.one_of(st.binary(max_size=100), damaged, shorter))
        def check(address: bytes) -> None:
            if any(address[at : at + 1] != good[at : at + 1] for at in interface) and address[:1] == good[:1]:
                return
            if kind is TcpDevice and leads_to(address, good):
                return
            with pytest.raises(REFUSED):
                device.connect(address, timeout=1.0)

        check()
        with device.connect(good) as channel:
            channel.signal(other.allocate(8).remote().view(), 1).wait(SECONDS)


@settings(SEEDED, max_examples=100)
@given(st.integers(-(2**63), 2**64 - 1), st.binary(max_size=40))
def test_any_port_and_token(port: int, token: bytes) -> None:
    """Nobody of this machine knows the token, whoever listens on the port."""
    if 0 < port < 65536:
        port += 65536
    with TcpDevice() as device, pytest.raises(REFUSED):
        device.connect(msgspec.msgpack.encode(TcpAddress("127.0.0.1", port, token)), timeout=1.0)


# ---- capabilities


@pytest.mark.parametrize("name", corpus("remote-regions"))
def test_the_corpus_of_remote_regions(name: str) -> None:
    with pytest.raises(ArgumentError):
        RemoteRegion.unpack(corpus("remote-regions")[name])


def test_any_capability_without_a_key_is_refused(pair: Pair) -> None:
    region, mine = pair.target.allocate(64), pair.initiator.allocate(64)
    array(region)[:] = array(mine)[:] = 5
    real = region.remote().pack()
    names = st.sampled_from([real[8:16], b"verbs\0\0\0", b"fax\0\0\0\0\0"])
    heads = st.builds(
        lambda access, length, name: real[:1] + bytes([access]) + length + name,
        st.sampled_from([0, 1]),
        st.binary(min_size=6, max_size=6),
        names,
    )
    bodies = st.binary(min_size=16, max_size=16)

    @settings(SEEDED, max_examples=100)
    @given(st.one_of(st.binary(min_size=32, max_size=32), st.builds(bytes.__add__, heads, bodies)))
    def check(data: bytes) -> None:
        try:
            forged = RemoteRegion.unpack(data)
        except ArgumentError:
            return
        assert forged.pack() == data
        if forged.length < 8:
            return
        for completion in (
            lambda: pair.channel.write(mine.view(0, 8), forged.view(0, 8)),
            lambda: pair.channel.read(mine.view(0, 8), forged.view(0, 8)),
            lambda: pair.channel.signal(forged.view(0, 8), 9),
        ):
            with pytest.raises(RemoteAccessError):
                completion().wait(SECONDS)

    check()
    assert np.all(array(region) == 5)
    assert np.all(array(mine) == 5)


# ---- greetings


@pytest.mark.parametrize("name", corpus("greetings"))
def test_the_corpus_of_greetings(far_spec: DeviceSpec, name: str) -> None:
    with far_spec.make() as target, far_spec.make() as initiator, initiator.connect(target.address) as channel:
        with raw_connection(target) as sock:
            send_and_end(sock, corpus("greetings")[name])
        check_works(Pair(far_spec, initiator, target, channel))


@contextlib.contextmanager
def between(change: dict[int, int], end: int) -> Iterator[list[BaseException | bytes | None]]:
    """A handshake of two ends, seen by somebody between them who changes bytes, and cuts it off after ``end`` bytes.

    Yields what came of the initiator and of the acceptor: an error, None, or the purpose.
    """
    (a, b), (c, d) = socket.socketpair(), socket.socketpair()
    results: list[BaseException | bytes | None] = [None, None]

    def run(which: int, sock: socket.socket) -> None:
        try:
            results[which] = handshake.accept(sock, SECRET) if which else handshake.initiate(sock, SECRET, b"tcp")
        except TensorwireError as error:
            results[which] = error
        finally:
            sock.close()

    for sock in (a, b, c, d):
        sock.settimeout(SECONDS)
    threads = [threading.Thread(target=run, args=each) for each in ((0, a), (1, d))]
    for thread in threads:
        thread.start()
    with b, c:
        at = 0
        for source, sink, nbytes in ((b, c, 40), (c, b, 68), (b, c, 32), (c, b, 1)):
            try:
                data = bytearray(handshake.receive_exactly(source, nbytes))
                for i in range(nbytes):
                    data[i] ^= change.get(at + i, 0)
                sink.sendall(data[: max(0, end - at)])
            except OSError:  # one of them has seen enough
                break
            at += nbytes
            if at > end or (at == 40 and 4 in change):  # the acceptor waits for another number of bytes
                break
    for thread in threads:
        thread.join()
    yield results


HANDSHAKE = 40 + 68 + 32 + 1


def test_a_handshake_cut_off_anywhere_admits_nobody() -> None:
    for end in range(HANDSHAKE):
        with between({}, end) as (initiator, acceptor):
            assert isinstance(initiator, (PeerLost, AuthenticationError))
            # The last byte is the acceptor's word that it is content.
            assert isinstance(acceptor, (PeerLost, AuthenticationError)) or end == HANDSHAKE - 1
    with between({}, HANDSHAKE) as results:
        assert results == [None, b"tcp"]


def test_a_handshake_with_any_byte_changed_admits_nobody() -> None:
    for at in range(HANDSHAKE):
        with between({at: 1 << at % 8}, HANDSHAKE) as (initiator, acceptor):
            assert isinstance(initiator, TensorwireError), at
            assert isinstance(acceptor, TensorwireError) or at == HANDSHAKE - 1


def test_a_recorded_handshake_admits_nobody_again(far_spec: DeviceSpec) -> None:
    """Of either side: nonces are fresh."""
    with far_spec.make() as target:
        assert isinstance(target, (TcpDevice, ShmDevice))
        purpose = target.name.encode()
        with raw_connection(target) as sock:
            nonce = secrets.token_bytes(32)
            greeting = handshake.MAGIC + bytes([3]) + purpose + nonce
            sock.sendall(greeting)
            answer = handshake.receive_exactly(sock, 68)
            shown = handshake.proof(target._token, b"initiate", purpose, answer[4:36], nonce)
            sock.sendall(shown)
            assert handshake.receive_exactly(sock, 1) == b"\x01"
        with raw_connection(target) as sock:
            sock.sendall(greeting + shown)
            assert len(handshake.receive_exactly(sock, 68)) == 68
            until_end(sock)
    a, b = socket.socketpair()
    with a, b:
        a.settimeout(SECONDS)
        b.sendall(answer + b"\x01")
        with pytest.raises(AuthenticationError):
            handshake.initiate(a, target._token, purpose)


# ---- shm: questions for descriptors, and hostile answers


@pytest.fixture
def shm() -> Iterator[tuple[ShmDevice, Pair]]:
    """A device with regions under known keys, and a good channel to it."""
    spec = DeviceSpec("tensorwire.device:ShmDevice")
    with ShmDevice() as target, ShmDevice() as initiator, initiator.connect(target.address) as channel:
        for key, access in ((BOTH, "write"), (READS, "read"), (CLOSED, "write")):
            region = target.allocate(4096)
            array(region)[:] = pattern(key % 50, 4096)
            target._exposed[key] = (region, access)  # type: ignore[assignment]
            if key == CLOSED:
                region.close()
        yield target, Pair(spec, initiator, target, channel)
        check_works(Pair(spec, initiator, target, channel))
        for key in (BOTH, READS):
            region, _ = target._exposed.pop(key)
            assert np.array_equal(array(region), pattern(key % 50, 4096))
        del region
        target._exposed.clear()


def check_questions(device: ShmDevice, stream: bytes) -> None:
    """Each question gets its answer; a descriptor only where the key and the access allow it."""
    with authenticated(device) as sock:
        sock.sendall(stream)
        sock.shutdown(socket.SHUT_WR)
        for at in range(0, len(stream) - ASK.size + 1, ASK.size):
            key, write = ASK.unpack_from(stream, at)
            status, fds, _, _ = socket.recv_fds(sock, 1, 4)
            try:
                allowed = key == BOTH or (key == READS and not write)
                assert status == (b"\x00" if allowed else b"\x03" if key == READS else b"\x01")
                assert len(fds) == allowed
                if allowed and not write:
                    with pytest.raises(OSError, match=r".*"):
                        Memory.map(fds[0], True)
                    with pytest.raises(OSError, match=r".*"):
                        os.write(fds[0], b"x")
            finally:
                for fd in fds:
                    os.close(fd)
        assert sock.recv(1) == b""


@pytest.mark.parametrize("name", corpus("shm-questions"))
def test_the_corpus_of_questions(shm: tuple[ShmDevice, Pair], name: str) -> None:
    check_questions(shm[0], corpus("shm-questions")[name])


def test_any_questions(shm: tuple[ShmDevice, Pair]) -> None:
    keys = st.one_of(st.sampled_from([BOTH, READS, CLOSED, 0]), st.integers(0, 2**64 - 1))
    questions = st.lists(st.builds(ASK.pack, keys, st.sampled_from([0, 1, 2, 255])), max_size=6).map(b"".join)

    @settings(SEEDED, max_examples=80)
    @given(st.builds(bytes.__add__, questions, st.binary(max_size=8)))
    def check(stream: bytes) -> None:
        check_questions(shm[0], stream)

    check()


def memfd(nbytes: int, *, sealed: bool) -> int:
    """A file in memory, of somebody who plays by the rules or not."""
    if sealed:
        memory = Memory.allocate(nbytes)
        return os.dup(memory.fd)
    fd = os.memfd_create("tensorwire")
    os.truncate(fd, nbytes)
    return fd


ANSWERS = {
    "nothing": (b"", []),
    "no descriptor": (b"\x00", []),
    "an unknown status": (b"\x77", []),
    "a refusal with a descriptor": (b"\x01", ["sealed"]),
    "a pipe": (b"\x00", ["pipe"]),
    "a socket": (b"\x00", ["socket"]),
    "a device": (b"\x00", ["/dev/zero"]),
    "a folder": (b"\x00", ["/"]),
    "memory that may shrink": (b"\x00", ["unsealed"]),
    "less memory than it was to be": (b"\x00", ["small"]),
    "two descriptors": (b"\x00", ["small", "small"]),
    "twenty descriptors": (b"\x00", ["small"] * 20),
    "two answers": (b"\x00\x01", ["small"]),
}


def descriptor(what: str, stack: contextlib.ExitStack) -> int:
    if what == "pipe":
        fds = list(os.pipe())
    elif what == "socket":
        fds = [sock.detach() for sock in socket.socketpair()]
    elif what.startswith("/"):
        fds = [os.open(what, os.O_RDONLY)]
    else:
        fds = [memfd(4096 if what == "small" else 1 << 16, sealed=what != "unsealed")]
    for fd in fds:
        stack.callback(os.close, fd)
    return fds[0]


@pytest.mark.parametrize("name", ANSWERS)
def test_a_hostile_answer_is_an_error_of_ours(name: str) -> None:
    """The initiator asks for 64 KiB; whatever comes, nothing crashes, and its other channels work."""
    data, what = ANSWERS[name]
    token, listed = bytes(32), secrets.token_bytes(16)
    with (
        socket.socket(socket.AF_UNIX) as listener,
        ShmDevice() as device,
        ShmDevice() as good,
        device.connect(good.address) as other,
        contextlib.ExitStack() as stack,
    ):
        listener.bind(b"\0tensorwire-" + listed.hex().encode())
        listener.listen()
        source = device.allocate(1 << 16)
        with played(device, listener, listed + token, token) as (channel, sock):
            if data:
                socket.send_fds(sock, [data], [descriptor(each, stack) for each in what])
            sock.shutdown(socket.SHUT_WR)
            remote = RemoteRegion("shm", 1, 1 << 16, "write")
            with pytest.raises((RemoteAccessError, ProtocolError, PeerLost)):
                channel.write(source.view(), remote.view()).wait(SECONDS)
        with good.allocate(8) as region:
            other.signal(region.remote().view(), 3).wait(SECONDS)
            assert region.load(0) == 3


def test_nothing_of_shm_has_a_name() -> None:
    with ShmDevice() as device, device.connect(device.address) as channel:
        region = device.allocate(1 << 20)
        channel.signal(region.remote().view(0, 8), 1).wait(SECONDS)
        others = f"tensorwire-{os.getuid()}-"  # folders of jobs that publish versions, which may run beside this test
        assert [p for p in Path("/dev/shm").glob("*tensorwire*") if others not in p.name] == []
        assert Path(f"/proc/self/fd/{region.fd}").readlink().name == "memfd:tensorwire (deleted)"
