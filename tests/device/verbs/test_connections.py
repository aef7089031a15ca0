"""Both ends of a channel: how they find each other, its lanes, and its end."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.harness.cable import WORD, cable, queue_pair, until
from tests.harness.fake_nic import Fabric

from tensorwire.device import VerbsDevice, handshake
from tensorwire.device.verbs import nic
from tensorwire.device.verbs.device import VerbsAddress
from tensorwire.errors import ArgumentError, AuthenticationError, PeerLost, RemoteAccessError, TensorwireError
from tensorwire.testing.patterns import SECONDS, array

OPEN, AGAIN = 1, 2


def frame(
    kind: int = OPEN, *, lane: int = 0, count: int = 1, receives: int = 32, magic: bytes = b"TWV1", ends: bytes = b""
) -> bytes:
    """One side's description of its queue pairs; `tensorwire.device.verbs.connection` has the layout."""
    return struct.pack("<4sBBHI", magic, kind, lane, count, receives) + ends


END = struct.pack("!IIH16sBB", 4000, 1, 0, bytes(16), 1, 5)  # a queue pair that nobody has


# ---- lanes


def test_each_lane_is_a_queue_pair_of_its_own(fabric: Fabric) -> None:
    with cable(fabric, queue_pairs=3) as c:
        lanes = c.channel.lanes
        assert len({queue_pair(lane).qp_num for lane in lanes}) == 3
        with fabric.held():
            posted = [
                lane.write(
                    c.source.view(64 * i, 64), c.remote.view(64 * i, 64), (c.remote.view(WORD + 8 * i, 8), i + 1)
                )
                for i, lane in enumerate(lanes)
            ]
            while queue_pair(lanes[2]).step():  # what goes over one lane does not wait for the others
                pass
            posted[2].wait(SECONDS)
            assert [completion.done for completion in posted] == [False, False, True]
            assert [c.target.load(WORD + 8 * i) for i in range(3)] == [0, 0, 3]
        for completion in posted:
            completion.wait(SECONDS)
        assert [c.target.load(WORD + 8 * i) for i in range(3)] == [1, 2, 3]
        assert c.arrived(0, 192)


def test_a_refusal_on_one_lane_leaves_the_others_alone(fabric: Fabric) -> None:
    with cable(fabric, queue_pairs=3) as c:
        lanes = c.channel.lanes
        before = [queue_pair(lane).qp_num for lane in lanes]
        bad = replace(c.remote, key=c.remote.key ^ 1)
        with pytest.raises(RemoteAccessError):
            lanes[1].signal(bad.view(WORD, 8), 1).wait(SECONDS)
        for value, lane in enumerate(lanes, 1):
            lane.signal(c.remote.view(WORD, 8), value).wait(SECONDS)
            assert c.word == value
        after = [queue_pair(lane).qp_num for lane in lanes]
        assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]


def test_lanes_end_together(fabric: Fabric) -> None:
    with cable(fabric, queue_pairs=2) as c:
        c.channel.lanes[1].close()
        for lane in c.channel.lanes:
            with pytest.raises(PeerLost, match="the channel was closed"):
                lane.signal(c.remote.view(WORD, 8), 1)
        until(lambda: not fabric.pairs)  # the other side hears of it


# ---- set-up


def raw(device: VerbsDevice) -> socket.socket:
    """A connection that has shown its token, and speaks for itself from here on."""
    where = msgspec.msgpack.decode(device.address, type=VerbsAddress)
    sock = socket.create_connection((where.interface, where.port), SECONDS)
    handshake.initiate(sock, where.token, b"verbs" + struct.pack("<Q", 1))
    return sock


@pytest.mark.parametrize(
    ("data", "answers"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 0),
        (frame(magic=b"TWV0", ends=END), 0),
        (frame(AGAIN, ends=END), 0),
        (frame(kind=3, ends=END), 0),
        (frame(count=0), 0),
        (frame(count=65, ends=65 * END), 0),
        (frame(count=2**16 - 1, ends=END), 0),
        (frame(receives=0, ends=END), 0),
        (frame(receives=1 << 16, ends=END), 0),
        (frame(ends=END[:-1] + b"\x09"), 0),
        (frame(ends=END[:4] + b"\xff" * 4 + END[8:]), 0),
        (frame(ends=END) + frame(ends=END), 1),
        (frame(ends=END) + frame(AGAIN, lane=1, ends=END), 1),
        (frame(ends=END) + frame(AGAIN, count=2, ends=2 * END), 1),
    ],
)
def test_a_frame_that_is_wrong_ends_its_connection_only(fabric: Fabric, data: bytes, answers: int) -> None:
    with cable(fabric, heartbeat=3600.0) as c:  # no heartbeat ends it instead
        with raw(c.other) as sock:
            sock.sendall(data)
            got = b""
            while more := sock.recv(4096):
                got += more
        assert len(got) == answers * (12 + len(END))
        c.works()
        until(lambda: len(fabric.pairs) == 2)


def test_a_connection_that_ends_in_the_middle_of_a_frame(fabric: Fabric) -> None:
    with cable(fabric) as c:
        for length in (1, 11, 12, 39):
            with raw(c.other) as sock:
                sock.sendall(frame(ends=END)[:length])
        c.works()
        until(lambda: len(fabric.pairs) == 2)


@pytest.mark.parametrize(
    "answer",
    [b"", b"x" * 40, frame(AGAIN, ends=END), frame(count=2, ends=2 * END), frame(ends=b"\xff" * 28)],
)
def test_a_target_that_answers_nonsense(fabric: Fabric, in_thread: Callable[..., Any], answer: bytes) -> None:
    token = bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as listener, VerbsDevice() as device:

        def target() -> None:
            sock, _ = listener.accept()
            with sock:
                handshake.accept(sock, token)
                sock.recv(4096)
                sock.sendall(answer)

        served = in_thread(target)
        address = VerbsAddress("127.0.0.1", listener.getsockname()[1], token, "verbs")
        with pytest.raises(TensorwireError):
            device.connect(msgspec.msgpack.encode(address), SECONDS)
        served.join(SECONDS)
        assert fabric.pairs == {}


def test_addresses_that_lead_nowhere(fabric: Fabric) -> None:
    with VerbsDevice() as device, VerbsDevice() as other:
        where = msgspec.msgpack.decode(other.address, type=VerbsAddress)
        with pytest.raises((AuthenticationError, PeerLost)):
            device.connect(msgspec.msgpack.encode(msgspec.structs.replace(where, token=bytes(32))), SECONDS)
        with socket.create_connection((where.interface, where.port), SECONDS) as sock:
            sock.sendall(bytes(100))
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(4096) == b""
        for wrong in (b"", b"no address", msgspec.msgpack.encode(msgspec.structs.replace(where, kind="tcp"))):
            with pytest.raises(ArgumentError, match="not the address of a verbs device"):
                device.connect(wrong, SECONDS)
        other.close()
        with pytest.raises(PeerLost):
            device.connect(msgspec.msgpack.encode(where), 1.0)


# ---- the end


@pytest.mark.parametrize("what", ["channel", "device"])
def test_closing_with_operations_on_their_way(fabric: Fabric, what: str) -> None:
    with cable(fabric) as c:
        with fabric.held():
            posted = [c.write(64 * i, 64, signal=i + 1) for i in range(10)]
            c.pair.step()
            (c.channel if what == "channel" else c.device).close()
            assert all(completion.done for completion in posted)
        for completion in posted:
            with pytest.raises(PeerLost, match="was closed"):
                completion.wait(SECONDS)
        assert c.arrived(0, 64)
        assert not c.arrived(64, 640), "something was executed after close() had returned"
        assert c.word == 0


def test_close_is_idempotent_and_safe_from_any_thread(fabric: Fabric, in_thread: Callable[..., Any]) -> None:
    with cable(fabric) as c:
        c.works()
        start = threading.Barrier(6)

        def close(what: Any) -> None:
            start.wait(SECONDS)
            what.close()
            what.close()

        threads = [in_thread(close, what) for what in (c.channel, c.channel, c.device, c.device, c.other, c.other)]
        for thread in threads:
            thread.join(SECONDS)
        assert fabric.pairs == {}
        assert fabric.registered == {}


def test_a_peer_that_closes_its_device_is_lost(fabric: Fabric) -> None:
    with cable(fabric) as c:
        told: list[str] = []
        c.channel.on_lost(told.append)
        with fabric.held():
            posted = c.write(0, 64)
            c.other.close()
        with pytest.raises(PeerLost):
            posted.wait(SECONDS)
        until(lambda: bool(told))
        assert c.channel.lost
        c.channel.settle(SECONDS)
        assert fabric.pairs == {}


def test_a_channel_that_its_peer_closes_ends_waits_for_it(fabric: Fabric) -> None:
    with cable(fabric) as c:
        c.channel.close()
        with pytest.raises(PeerLost):
            c.target.wait(WORD, 1, SECONDS)
        with c.device.connect(c.other.address) as again:  # the device itself is as good as before
            again.signal(c.remote.view(WORD, 8), 1).wait(SECONDS)
            c.target.wait(WORD, 1, SECONDS, again)


def test_a_machine_that_is_gone_is_found_by_the_heartbeat(fabric: Fabric) -> None:
    """Nothing is posted, and no socket says anything: only the question of an idle channel finds out."""
    with cable(fabric, heartbeat=3600.0) as c:
        c.works()
        silent = c.pair.peer
        assert silent is not None
        c.device._tick()
        assert not c.channel.lost
        del fabric.pairs[silent.qp_num]
        c.device._tick()
        until(lambda: c.channel.lost)
        with pytest.raises(PeerLost, match="its NIC does not answer"):
            c.write(0, 8)


def test_settle_cuts_off_what_a_lost_peer_has_posted(fabric: Fabric) -> None:
    with cable(fabric) as c, c.other.connect(c.device.address) as back:
        mine = c.device.allocate(64)
        theirs = c.other.allocate(64)
        array(theirs)[:] = 7
        with pytest.raises(ArgumentError, match="is not lost"):
            c.channel.settle(SECONDS)
        with fabric.held():
            late = back.write(theirs.view(), mine.remote().view())
            c.channel._connection.lose("the test says so")  # type: ignore[attr-defined]
            c.channel.settle(SECONDS)
        assert not array(mine).any(), "the lost peer has written after settle() had returned"
        with pytest.raises(PeerLost):
            late.wait(SECONDS)


def test_a_connection_that_fails_halfway_leaves_nothing(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    with VerbsDevice() as device, VerbsDevice() as other:
        real = nic.Nic.create

        def create(self: nic.Nic, sends: int, receives: int) -> tuple[Any, int]:
            if self is device._nic and len(fabric.pairs) == 1:
                raise PeerLost("no second queue pair")
            return real(self, sends, receives)

        monkeypatch.setattr(nic.Nic, "create", create)
        device._settings = replace(device._settings, lanes=2)
        with pytest.raises(PeerLost, match="no second queue pair"):
            device.connect(other.address, SECONDS)
        assert fabric.pairs == {}
