"""Whoever does not hold the secret can neither join, publish nor look up, and disturbs nobody."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from tensorwire.control import Client, authentication, frames
from tensorwire.control.names import PURPOSE
from tensorwire.device import handshake
from tensorwire.errors import AuthenticationError, PeerLost, ProtocolError
from tests.control import wire
from tests.control.conftest import SECRET, Jobs

JOIN = frames.encode(frames.Join(frames.VERSION, "worker", 0, 1, "host"))


def test_a_wrong_secret_is_refused_on_both_sides(jobs: Jobs) -> None:
    coordinator = jobs.coordinator()
    with pytest.raises(AuthenticationError, match="secret"):
        Client(coordinator.address, b"another secret", "worker", 0)
    assert coordinator.members == []
    assert not coordinator.ended.is_set()
    jobs.client(coordinator)  # whoever holds it is welcome, under the same name


def test_a_member_believes_no_coordinator_without_the_secret() -> None:
    """Somebody else listens at the job's address: the member sends it nothing but its greeting."""
    listener = socket.create_server(("127.0.0.1", 0))
    heard = bytearray()

    def impostor() -> None:
        sock, _ = listener.accept()
        with sock:
            heard.extend(handshake.receive_exactly(sock, 4 + 1 + len(PURPOSE) + handshake.NONCE))
            sock.sendall(handshake.MAGIC + bytes(handshake.NONCE) + bytes(32))
            while data := sock.recv(1000):
                heard.extend(data)

    thread = threading.Thread(target=impostor)
    thread.start()
    with listener, pytest.raises(AuthenticationError):
        Client(f"127.0.0.1:{listener.getsockname()[1]}", SECRET, "worker", 0)
    thread.join()
    assert b"worker" not in heard
    assert SECRET not in heard


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100),
        bytes(1000),
        JOIN + JOIN,
        b"TWH1\x07another" + bytes(100),
        b"TWH1\xff" + bytes(400),
        b"TWH1" + bytes([len(PURPOSE)]) + PURPOSE + bytes(32) + bytes(32) + JOIN,
        os.urandom(5000),
    ],
    ids=["http", "zeros", "join", "another purpose", "oversized purpose", "no proof", "noise"],
)
def test_whatever_a_stranger_sends_ends_its_connection_only(jobs: Jobs, data: bytes) -> None:
    coordinator = jobs.coordinator(workers=1)
    member = jobs.client(coordinator)
    with wire.connection(coordinator) as sock:
        sock.sendall(data)
        while not wire.ends(sock):
            pass
    assert coordinator.members == ["worker 0"]
    member.publish("key", b"value")
    assert member.lookup("key") == b"value"


def test_nothing_is_parsed_before_authentication(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    decode = frames.decode

    def recorded(body: bytes) -> frames.Any:
        parsed.append(body)
        return decode(body)

    coordinator = jobs.coordinator()
    monkeypatch.setattr(frames, "decode", recorded)
    with wire.connection(coordinator) as sock:
        sock.sendall(JOIN * 20)
        assert wire.ends(sock)
    assert parsed == []
    with wire.joined(coordinator):  # the recorder works
        pass
    assert parsed


def test_half_open_connections_time_out(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "GREETING_SECONDS", 0.2)
    coordinator = jobs.coordinator()
    with wire.connection(coordinator) as silent, wire.connection(coordinator) as slow:
        slow.sendall(b"TW")
        assert wire.ends(silent)
        assert wire.ends(slow)


def test_who_has_the_secret_and_never_joins_times_out(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorwire.control.coordinator.GREETING_SECONDS", 0.2)
    coordinator = jobs.coordinator()
    with wire.authenticated(coordinator) as sock:
        assert wire.ends(sock)


def test_strangers_end_with_the_coordinator(jobs: Jobs) -> None:
    coordinator = jobs.coordinator()
    with wire.connection(coordinator) as sock:
        sock.sendall(handshake.MAGIC)
        coordinator.close()
        assert wire.ends(sock)
    with pytest.raises(PeerLost, match="no coordinator answers"):
        Client(coordinator.address, SECRET, "worker", 0)


def test_another_service_at_the_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def service() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"220 mail.example ESMTP\r\n")
                while not wire.ends(sock):
                    pass

        thread = threading.Thread(target=service)
        thread.start()
        with pytest.raises(ProtocolError, match="does not speak Tensorwire"):
            Client(f"127.0.0.1:{listener.getsockname()[1]}", SECRET, "worker", 0)
        thread.join()


def test_whoever_has_greeted_stays(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member may be slow between two words; those that say nothing have to go before it."""
    monkeypatch.setattr(authentication, "MOST_STRANGERS", 8)
    coordinator = jobs.coordinator(workers=1)
    with wire.connection(coordinator) as honest, contextlib.ExitStack() as stack:
        nonce = os.urandom(handshake.NONCE)
        honest.sendall(handshake.MAGIC + bytes([len(PURPOSE)]) + PURPOSE + nonce)
        answer = handshake.receive_exactly(honest, 4 + handshake.NONCE + 32)
        flood = [stack.enter_context(wire.connection(coordinator)) for _ in range(24)]
        for sock in flood[:16]:
            assert wire.ends(sock)
        honest.sendall(handshake.proof(SECRET, b"initiate", PURPOSE, answer[4:36], nonce))
        assert handshake.receive_exactly(honest, 1) == b"\x01"


def test_members_come_through_loops_that_connect_without_a_pause(jobs: Jobs) -> None:
    coordinator = jobs.coordinator(workers=8)
    host, _, port = coordinator.address.rpartition(":")
    over = threading.Event()

    def hammer() -> None:
        held: list[socket.socket] = []
        for _ in range(5000):
            if over.is_set():
                break
            held.append(socket.create_connection((host, int(port)), 60.0))
            if len(held) > 200:
                held.pop(0).close()
        for sock in held:
            sock.close()

    threads = [threading.Thread(target=hammer) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        members = [jobs.client(coordinator, index=i) for i in range(8)]
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert len(coordinator.members) == len(members) == 8


def test_a_member_that_is_turned_away_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has been told to go too often; pauses are what nobody needs here."""
    monkeypatch.setattr(handshake.time, "sleep", lambda _: None)
    came = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def turn_away() -> None:
            nonlocal came
            for _ in range(handshake.MOST_TRIES):
                listener.accept()[0].close()
                came += 1

        thread = threading.Thread(target=turn_away)
        thread.start()
        with pytest.raises(PeerLost):
            Client(f"127.0.0.1:{listener.getsockname()[1]}", SECRET, "worker", 0)
        thread.join()
    assert came == handshake.MOST_TRIES
