"""Frames that nobody would send: the tcp engine does with them exactly what the document says, and nothing else.

Hypothesis makes them up; what was worth keeping lies in corpus/ and is sent again in every run.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Exposed, Initiator, Target
from wire import (
    ACK,
    COMPARE_SWAP,
    DATA,
    FETCH_ADD,
    FRAME,
    NONE,
    OLD_VALUE,
    READ,
    REFUSE,
    WRITE,
    authenticated,
    check_works,
    corpus,
    frame,
    played,
    raw_connection,
    until_end,
)

from tensorwire.device import TcpDevice
from tensorwire.device.tcp import TcpAddress
from tensorwire.errors import PeerLost, RemoteAccessError
from tensorwire.testing.fixtures import SEEDED, Pair
from tensorwire.testing.patterns import SECONDS, array, pattern, resident
from tensorwire.testing.spec import DeviceSpec

BOTH, READS = 0x1122334455667788, 0x8877665544332211  # keys that the corpus knows
ROOM = 512
CLOSED = 0x5555


@pytest.fixture
def spec() -> DeviceSpec:
    return DeviceSpec("tensorwire.device:TcpDevice")


class Victim:
    """A device with regions under known keys, one of them closed, and a good channel beside the bad ones."""

    def __init__(self, pair: Pair) -> None:
        assert isinstance(pair.target, TcpDevice)
        self.pair, self.device = pair, pair.target
        self.regions = {key: self.device.allocate(ROOM) for key in (BOTH, READS, CLOSED)}
        for key, region in self.regions.items():
            self.device._engine.expose(key, region, key != READS)
        self.regions[CLOSED].close()
        self.good = self.device.allocate(4096)
        array(self.good)[:] = pattern(5, 4096)

    def check(self, stream: bytes) -> None:
        """Sends it over a connection of its own; memory and answers must be as the model says."""
        for key, region in self.regions.items():
            array(region)[:] = pattern(key % 100, ROOM)
        memory = {key: Exposed(bytearray(region), key != READS) for key, region in self.regions.items()}
        model = Target({key: memory[key] for key in (BOTH, READS)})
        model.take(stream)
        with authenticated(self.device) as sock:
            with contextlib.suppress(OSError):  # it may hang up in the middle
                sock.sendall(stream)
            whole = not model.broken and not model.cut
            got = list(self._answers(sock, model.applied)) if whole else []
            if not model.broken:  # else the engine ends it by itself
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
            got += self._answers(sock, -1)
            until_end(sock)
        assert got == model.answers[: len(got)]
        if whole:
            assert got == model.answers
        for key, region in self.regions.items():
            # What a half-sent payload left is not promised, but it stays within that write.
            want, have = bytearray(memory[key].memory), bytearray(region)
            if model.partial is not None and model.partial[0] == key:
                want[model.partial[1] : model.partial[2]] = have[model.partial[1] : model.partial[2]]
            assert have == want
        assert bytes(self.good) == pattern(5, 4096).tobytes()

    @staticmethod
    def _answers(sock: socket.socket, until: int) -> Iterator[tuple[int, int, int]]:
        """All but acks, until that operation was answered; -1: until the connection ends."""
        answered = 0
        while answered < until or until < 0:
            data = read_all(sock, FRAME.size)
            if len(data) < FRAME.size:
                return
            magic, op, answered, key, _, length, *_ = FRAME.unpack(data)
            assert magic == b"TWF1"
            assert op in (ACK, REFUSE, DATA, OLD_VALUE)
            if op == DATA and len(read_all(sock, length)) < length:
                return
            if op != ACK:
                yield op, answered, length if op == DATA else key


def read_all(sock: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or less if the connection ends."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < nbytes and (part := sock.recv(nbytes - len(data))):
            data += part
    return data


@pytest.fixture
def victim(pair: Pair) -> Iterator[Victim]:
    made = Victim(pair)
    yield made
    check_works(pair)
    assert not pair.channel.lost
    with pair.initiator.allocate(4096) as back:
        pair.channel.read(back.view(), made.good.remote("read").view()).wait(SECONDS)
        assert np.array_equal(array(back), pattern(5, 4096))
    vars(made).clear()  # pytest holds it longer than its regions may live


def near(*likely: int) -> st.SearchStrategy[int]:
    """Mostly what an honest peer might send."""
    return st.one_of(st.sampled_from(likely), st.sampled_from(likely), st.integers(0, 2**64 - 1))


KEYS = near(BOTH, BOTH, BOTH, READS, CLOSED, 0)
OFFSETS = near(0, 8, 16, 13, 500, ROOM - 8, ROOM, NONE, NONE - 7)
SIGNALS = st.one_of(st.just((0, NONE, 0)), st.tuples(KEYS, OFFSETS, near(1, 2**63)))


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A connection's worth of frames, most of them in order and with their payloads."""
    stream, number = b"", 0
    for _ in range(draw(st.integers(1, 6))):
        number += draw(st.sampled_from([1] * 12 + [0, 2]))
        op = draw(st.sampled_from([WRITE] * 12 + [READ, FETCH_ADD, COMPARE_SWAP] * 4 + [0, 5, ACK, DATA, 2**32 - 1]))
        if op in (FETCH_ADD, COMPARE_SWAP):
            length = draw(st.sampled_from([8] * 9 + [0, 7, 16]))
        else:
            length = draw(st.one_of(st.integers(0, 60), st.sampled_from([0, 1, 8, ROOM, ROOM + 1, 2**40, NONE])))
        magic = draw(st.sampled_from([b"TWF1"] * 15 + [b"TWF0"]))
        key, offset, signal = draw(KEYS), draw(OFFSETS), draw(SIGNALS)
        stream += frame(op, number, key=key, offset=offset, length=length, signal=signal, magic=magic)
        if op == WRITE:
            stream += pattern(number, min(length, 1000)).tobytes()
    tail = draw(st.one_of(st.just(b""), st.just(b""), st.binary(max_size=70)))
    return stream[: len(stream) - draw(st.sampled_from([0, 0, 0, 1, 30, 64]))] + tail


def test_any_requests_do_what_the_document_says(victim: Victim) -> None:
    @settings(SEEDED, max_examples=250)
    @given(requests())
    def check(stream: bytes) -> None:
        victim.check(stream)

    check()


@pytest.mark.parametrize("name", corpus("tcp-requests"))
def test_the_corpus_of_requests(victim: Victim, name: str) -> None:
    victim.check(corpus("tcp-requests")[name])


GOOD = (
    frame(WRITE, 1, key=BOTH, offset=13, length=20, signal=(BOTH, 0, 1))
    + bytes(range(20))
    + frame(READ, 2, key=READS, offset=3, length=5)
    + frame(FETCH_ADD, 3, key=BOTH, offset=16, length=8, signal=(0, NONE, 5))
    + frame(COMPARE_SWAP, 4, key=BOTH, offset=0, length=8, signal=(1, NONE, 7))
    + frame(WRITE, 5, offset=NONE, signal=(BOTH, 8, 2))
)


def test_truncated_at_every_byte(victim: Victim) -> None:
    for end in range(len(GOOD) + 1):
        victim.check(GOOD[:end])


def test_every_byte_of_the_headers_changed(victim: Victim) -> None:
    payload = range(FRAME.size, FRAME.size + 20)
    for at in set(range(len(GOOD))) - set(payload):
        for flip in (0x01, 0x80):
            victim.check(GOOD[:at] + bytes([GOOD[at] ^ flip]) + GOOD[at + 1 :])


def test_frames_sent_twice_or_in_another_order(victim: Victim) -> None:
    frames = [GOOD[:84], GOOD[84:148], GOOD[148:212], GOOD[212:276], GOOD[276:]]
    for i in range(5):
        victim.check(b"".join([*frames[: i + 1], *frames[i:]]))
        victim.check(b"".join(frames[:i] + frames[i + 1 :] + frames[i : i + 1]))
        victim.check(b"".join(frames[: i + 1]) * 2)


def test_a_payload_that_is_too_long_is_thrown_away(victim: Victim) -> None:
    for length in (ROOM + 1, 2**40, 2**63, NONE):
        victim.check(frame(WRITE, 1, key=BOTH, length=length) + b"\xee" * 300_000)


def test_a_recorded_connection_cannot_be_replayed(victim: Victim) -> None:
    """Nonces differ, so what a listener heard is refused before any frame."""
    device = victim.device
    said, heard = socket.socketpair()
    with said, heard, raw_connection(device) as sock, socket.create_server(("127.0.0.1", 0)) as proxy:
        address = msgspec.structs.replace(device._address, port=proxy.getsockname()[1])
        connecting = threading.Thread(
            target=lambda: victim.pair.initiator.connect(msgspec.msgpack.encode(address)).close()
        )
        connecting.start()
        middle, _ = proxy.accept()
        with middle:
            greeting = read_all(middle, 5)
            greeting += read_all(middle, greeting[4] + 32)
            sock.sendall(greeting)
            middle.sendall(read_all(sock, 68))
            sock.sendall(last := read_all(middle, 32))
            middle.sendall(read_all(sock, 1))
            connecting.join()
    for stream in (greeting + last + GOOD, greeting + GOOD, GOOD):
        before = bytes(victim.regions[BOTH])
        with raw_connection(device) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(stream)
            answer = read_all(sock, 1 << 20)
        assert len(answer) in (0, 68)  # its own proof at most: never the byte that admits
        assert bytes(victim.regions[BOTH]) == before


def test_hostile_connections_leave_nothing(victim: Victim) -> None:
    engine, acceptor = victim.device._engine, victim.device._acceptor
    streams = [
        frame(WRITE, 1, key=BOTH, length=2**40) + bytes(100_000),  # oversized, and thrown away
        frame(WRITE, 1, key=BOTH, length=100) + bytes(50),
        b"".join(frame(READ, i, key=READS, length=ROOM) for i in range(1, 500)),  # whose answers nobody reads
        frame(99, 1),
        b"",
    ]

    def attack(rounds: int) -> None:
        for i in range(rounds):
            with authenticated(victim.device) as sock, contextlib.suppress(OSError):
                sock.sendall(streams[i % len(streams)])

    def settled() -> tuple[int, int]:
        while engine.connections > 1 or acceptor._greeted:
            threading.Event().wait(0.001)
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    attack(50)
    held, memory = settled(), resident()
    attack(300)
    assert settled() == held
    assert resident() - memory < 4 << 20


# ---- the initiator against a hostile target


class Asker:
    """A device whose peer is played by the test; and a good channel of the same device beside it."""

    def __init__(self, pair: Pair, listener: socket.socket) -> None:
        assert isinstance(pair.initiator, TcpDevice)
        self.pair, self.device = pair, pair.initiator
        self.listener = listener
        self.address = msgspec.msgpack.encode(TcpAddress("127.0.0.1", listener.getsockname()[1], b"t"))
        self.mine = self.device.allocate(64)

    def check(self, stream: bytes) -> None:
        """Answers a write, a read and a signal with it; completions and memory must be as the model says."""
        array(self.mine)[:] = 5
        there = self.mine.remote()
        model = Initiator(3, {2: 8})
        model.take(stream)
        with played(self.device, self.listener, self.address, b"t") as (channel, sock):
            posted = [
                channel.write(self.mine.view(0, 16), there.view(0, 16)),
                channel.read(self.mine.view(24, 8), there.view(0, 8)),
                channel.signal(there.view(0, 8), 1),
            ]
            with contextlib.suppress(OSError):
                sock.sendall(stream)
                sock.shutdown(socket.SHUT_WR)
            for number, completion in enumerate(posted, 1):
                if number > model.done:
                    expected: type[Exception] | None = PeerLost
                else:
                    expected = RemoteAccessError if number in model.refused else None
                with contextlib.nullcontext() if expected is None else pytest.raises(expected):
                    completion.wait(SECONDS)
                assert completion.done
            until_end(sock)
        want = bytearray(bytes([5]) * 64)
        came = model.filled.get(2, b"")
        want[24 : 24 + len(came)] = came
        have = bytearray(self.mine)
        if model.done < 2:  # it may have begun to arrive
            want[24:32] = have[24:32]
        assert have == want


@pytest.fixture
def asker(pair: Pair) -> Iterator[Asker]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Asker(pair, listener)
        yield made
    check_works(pair)
    assert not pair.channel.lost
    vars(made).clear()  # as above


REPLIES = frame(ACK, 1) + frame(DATA, 2, length=8) + b"answered" + frame(ACK, 3)


@st.composite
def replies(draw: st.DrawFn) -> bytes:
    """A target's answers to a write, a read of 8 bytes and a signal, most of them lawful."""
    stream, number = b"", 0
    for _ in range(draw(st.integers(1, 5))):
        number += draw(st.sampled_from([1] * 8 + [0, 2, 2**63]))
        lawful = DATA if number == 2 else ACK
        op = draw(st.sampled_from([lawful] * 8 + [REFUSE, DATA, ACK, OLD_VALUE, WRITE, READ, 0, 77]))
        length = draw(st.sampled_from([8] * 8 + [0, 7, 9, 2**40, NONE])) if op == DATA else 0
        magic = draw(st.sampled_from([b"TWF1"] * 15 + [b"TWF0"]))
        stream += frame(op, number % 2**64, key=draw(near(1, 2, 3)), length=length, magic=magic)
        if op == DATA:
            stream += pattern(number % 50, min(length, 100)).tobytes()
    return stream[: len(stream) - draw(st.sampled_from([0, 0, 0, 1, 9, 64]))] + draw(st.binary(max_size=3))


def test_any_replies_do_what_the_document_says(asker: Asker) -> None:
    @settings(SEEDED, max_examples=200)
    @given(replies())
    def check(stream: bytes) -> None:
        asker.check(stream)

    check()


@pytest.mark.parametrize("name", corpus("tcp-replies"))
def test_the_corpus_of_replies(asker: Asker, name: str) -> None:
    asker.check(corpus("tcp-replies")[name])


def test_replies_truncated_at_every_byte(asker: Asker) -> None:
    for end in range(len(REPLIES) + 1):
        asker.check(REPLIES[:end])


def test_every_byte_of_the_replies_changed(asker: Asker) -> None:
    for at in range(len(REPLIES)):
        asker.check(REPLIES[:at] + bytes([REPLIES[at] ^ 0x01]) + REPLIES[at + 1 :])


def test_replies_sent_twice(asker: Asker) -> None:
    for end in (64, 136, 200):
        asker.check(REPLIES[:end] * 2)


def test_the_model_itself_knows_good_from_bad() -> None:
    """The fuzzing is worth what its model is."""
    target = Target({BOTH: Exposed(bytearray(ROOM), True), READS: Exposed(bytearray(ROOM), False)})
    for wrong in (GOOD[:84] * 2, frame(9, 1), GOOD[84:]):
        other = deepcopy(target)
        other.take(wrong)
        assert other.broken
    target.take(GOOD)
    assert not target.broken
    assert target.answers == [
        (DATA, 2, 5),
        (OLD_VALUE, 3, int.from_bytes(bytes(range(3, 11)), "little")),
        (OLD_VALUE, 4, 1),
    ]
    initiator = Initiator(3, {2: 8})
    initiator.take(REPLIES)
    assert (initiator.done, initiator.filled[2], initiator.broken) == (3, b"answered", False)
