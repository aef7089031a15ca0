"""Strangers on a device's listener: a bounded number of threads and descriptors, and honest peers come through."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from wire import check_works, raw_connection, until_end

from tensorwire.device import Device, ShmDevice, TcpDevice, acceptor, handshake
from tensorwire.device.tcp import TcpAddress
from tensorwire.errors import PeerLost
from tensorwire.testing.fixtures import InThread, Pair
from tensorwire.testing.patterns import SECONDS
from tensorwire.testing.spec import DeviceSpec

MOST = 8


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "MOST_STRANGERS", MOST)


@contextlib.contextmanager
def flood(device: Device, count: int) -> Iterator[list[socket.socket]]:
    """So many connections that say nothing."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(raw_connection(device)) for _ in range(count)]


def greeters() -> int:
    return sum(thread.name in ("tensorwire-tcp", "tensorwire-shm") for thread in threading.enumerate())


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_strangers_take_a_bounded_number_of_threads_and_descriptors(far_spec: DeviceSpec) -> None:
    with far_spec.make() as target, far_spec.make() as initiator:
        threads, before = greeters(), descriptors()
        with flood(target, 5 * MOST) as strangers:
            for sock in strangers[: 4 * MOST]:
                until_end(sock)  # turned away: the oldest first
            assert greeters() <= threads + MOST + 1  # the last one that was turned away may be about to go
            assert descriptors() <= before + len(strangers) + MOST + 1
            with initiator.connect(target.address, SECONDS) as channel:
                check_works(Pair(far_spec, initiator, target, channel))


def test_whoever_has_spoken_stays(far_spec: DeviceSpec) -> None:
    """An honest peer may be slow between two words; those that say nothing have to go before it."""
    with far_spec.make() as target:
        assert isinstance(target, (TcpDevice, ShmDevice))
        purpose = target.name.encode()
        with raw_connection(target) as honest:
            nonce = secrets.token_bytes(32)
            honest.sendall(handshake.MAGIC + bytes([3]) + purpose + nonce)
            with flood(target, 3 * MOST) as strangers:
                for sock in strangers[: 2 * MOST]:
                    until_end(sock)
                answer = handshake.receive_exactly(honest, 68)
                honest.sendall(handshake.proof(target._token, b"initiate", purpose, answer[4:36], nonce))
                assert handshake.receive_exactly(honest, 1) == b"\x01"


def test_the_oldest_goes_where_all_have_spoken(far_spec: DeviceSpec) -> None:
    with far_spec.make() as target, flood(target, MOST) as strangers:
        for sock in strangers:
            sock.sendall(b"TW")
        with far_spec.make() as initiator, initiator.connect(target.address, SECONDS):
            until_end(strangers[0])


def test_whoever_knows_the_token_is_no_stranger(far_spec: DeviceSpec) -> None:
    with contextlib.ExitStack() as stack:
        target, initiator = stack.enter_context(far_spec.make()), stack.enter_context(far_spec.make())
        channels = [stack.enter_context(initiator.connect(target.address, SECONDS)) for _ in range(2 * MOST)]
        with flood(target, 3 * MOST) as strangers:
            for sock in strangers[: 2 * MOST]:
                until_end(sock)
            assert not any(channel.lost for channel in channels)


def test_honest_peers_come_through_a_flood(far_spec: DeviceSpec, in_thread: InThread) -> None:
    """Two loops connect without a pause, and hold on to what they have."""
    with far_spec.make() as target, far_spec.make() as initiator, contextlib.ExitStack() as stack:
        over = threading.Event()

        def hammer() -> None:
            held: list[socket.socket] = []
            for _ in range(2000):
                if over.is_set():
                    break
                with contextlib.suppress(OSError):
                    held.append(raw_connection(target))
                if len(held) > 30:
                    held.pop(0).close()
            for sock in held:
                sock.close()

        threads = [in_thread(hammer) for _ in range(2)]
        stack.callback(over.set)
        for _ in range(8):
            stack.enter_context(initiator.connect(target.address, SECONDS))
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("times", [1, 3])
def test_whoever_is_turned_away_comes_again(times: int, in_thread: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """After pauses, which nobody needs here."""
    monkeypatch.setattr(handshake.time, "sleep", lambda _: None)
    token = b"t" * 32
    with socket.create_server(("127.0.0.1", 0)) as listener, TcpDevice() as device:

        def turn_away() -> None:
            for _ in range(times):
                listener.accept()[0].close()
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(SECONDS)
                handshake.accept(sock, token)

        thread = in_thread(turn_away)
        device.connect(
            msgspec.msgpack.encode(TcpAddress("127.0.0.1", listener.getsockname()[1], token)), SECONDS
        ).close()
        thread.join()


def test_whoever_is_always_turned_away_gives_up(in_thread: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake.time, "sleep", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as listener, TcpDevice() as device:

        def turn_away() -> None:
            for _ in range(handshake.MOST_TRIES):
                listener.accept()[0].close()

        thread = in_thread(turn_away)
        with pytest.raises(PeerLost) as caught:
            device.connect(
                msgspec.msgpack.encode(TcpAddress("127.0.0.1", listener.getsockname()[1], b"t" * 32)), SECONDS
            )
        assert type(caught.value) is PeerLost
        thread.join()
