"""Who does not hold the secret, or does not speak the protocol, gets nothing and disturbs nobody."""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import check_works, raw_connection, send_and_end, until_end

from tensorwire.device import ShmDevice, TcpDevice, handshake
from tensorwire.device.tcp import TcpAddress
from tensorwire.errors import AuthenticationError, PeerLost, ProtocolError
from tensorwire.testing.fixtures import SEEDED, InThread, Pair
from tensorwire.testing.patterns import SECONDS
from tensorwire.testing.spec import DeviceSpec

SECRET = b"s" * 32


@contextmanager
def sockets(timeout: float = SECONDS):  # type: ignore[no-untyped-def]
    a, b = socket.socketpair()
    with a, b:
        a.settimeout(timeout)
        b.settimeout(timeout)
        yield a, b


def test_both_sides_learn_the_purpose(in_thread: InThread) -> None:
    with sockets() as (a, b):
        thread = in_thread(lambda: handshake.initiate(a, SECRET, b"store 3"))
        assert handshake.accept(b, SECRET) == b"store 3"
        thread.join()
        assert a.gettimeout() == b.gettimeout() == SECONDS


def test_a_wrong_secret_is_an_authentication_error_on_both_sides(in_thread: InThread) -> None:
    def initiate(sock: socket.socket) -> None:
        with pytest.raises(AuthenticationError):
            handshake.initiate(sock, b"another", b"tcp")

    with sockets() as (a, b):
        thread = in_thread(lambda: initiate(a))
        with pytest.raises(AuthenticationError):
            handshake.accept(b, SECRET)
        thread.join()


def test_an_acceptor_that_falls_silent_is_not_a_wrong_secret(in_thread: InThread) -> None:
    def accept(sock: socket.socket) -> None:
        greeting = handshake.receive_exactly(sock, 4 + 1 + 3 + 32)
        nonce = os.urandom(32)
        sock.sendall(handshake.MAGIC + nonce + handshake.proof(SECRET, b"accept", b"tcp", greeting[-32:], nonce))

    with sockets() as (a, b):
        a.settimeout(0.5)
        thread = in_thread(lambda: accept(b))
        with pytest.raises(PeerLost, match="silent"):
            handshake.initiate(a, SECRET, b"tcp")
        thread.join()


@settings(SEEDED, max_examples=100)
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda tail: handshake.MAGIC + tail)))
def test_garbage_is_a_typed_error(garbage: bytes) -> None:
    for side in (lambda sock: handshake.accept(sock, SECRET), lambda sock: handshake.initiate(sock, SECRET, b"x")):
        with sockets() as (a, b):
            a.sendall(garbage)
            a.shutdown(socket.SHUT_WR)
            with pytest.raises((ProtocolError, PeerLost, AuthenticationError)):
                side(b)


def test_a_drip_of_bytes_does_not_hold_the_acceptor() -> None:
    with sockets() as (a, b):
        b.settimeout(0.05)
        a.sendall(handshake.MAGIC[:2])
        with pytest.raises(PeerLost, match="silent"):
            handshake.accept(b, SECRET)


def test_a_wrong_token_is_refused(far_spec: DeviceSpec) -> None:
    with far_spec.make() as device, far_spec.make() as other:
        if isinstance(device, TcpDevice):
            changed = msgspec.structs.replace(device._address, token=b"x" * 32)
            address = msgspec.msgpack.encode(changed)
        else:
            assert isinstance(device, ShmDevice)
            address = device.address[:16] + b"x" * 32
        with pytest.raises(AuthenticationError):
            other.connect(address, timeout=SECONDS)
        assert not other.liveness.child_lost


def test_strangers_disturb_nobody(pair: Pair) -> None:
    if not pair.target.capabilities.other_processes:
        pytest.skip("nobody else can reach it")
    silent = [raw_connection(pair.target) for _ in range(5)]
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
        with raw_connection(pair.target) as sock:
            send_and_end(sock, garbage)
    check_works(pair)
    assert not pair.channel.lost
    pair.target.close()  # does not wait for those that never spoke
    for sock in silent:
        until_end(sock)
        sock.close()


def test_an_acceptor_that_says_nothing_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, TcpDevice() as device:
        address = msgspec.msgpack.encode(TcpAddress("127.0.0.1", listener.getsockname()[1], b"t"))
        with pytest.raises(PeerLost):
            device.connect(address, timeout=0.1)
