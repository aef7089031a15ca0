"""Lives, the monitor that ends them, and the heartbeat that shows one's own."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from tensorwire._native import Heartbeat, Liveness, Memory, Monitor
from tensorwire.testing.fixtures import InThread
from tensorwire.testing.patterns import SECONDS, until_asleep


def test_liveness_ends_once_with_its_first_reason() -> None:
    parent = Liveness()
    child, sibling = Liveness(parent), Liveness(parent)
    assert not any(
        liveness.lost or liveness.child_lost or liveness.forked or liveness.reason
        for liveness in (parent, child, sibling)
    )
    child.lose("first")
    child.lose("second")
    assert (child.lost, child.reason) == (True, "first")
    assert (parent.lost, parent.child_lost, sibling.lost) == (False, True, False)
    parent.lose("all")
    assert (parent.reason, sibling.lost) == ("all", False)


def test_liveness_keeps_its_parent() -> None:
    child = Liveness(Liveness())
    child.lose("gone")
    assert child.reason == "gone"


@pytest.mark.parametrize("whose", ["own", "peer", "child"])
def test_the_end_of_liveness_wakes_who_waits_on_it(whose: str, in_thread: InThread) -> None:
    own, peer = Liveness(), Liveness()
    child, stranger = Liveness(own), Liveness()
    memory = Memory.allocate(8)
    memory.bind(own)
    outcomes: list[int] = []
    thread = in_thread(lambda: outcomes.append(memory.wait(0, 1, SECONDS, None if whose == "child" else peer)))
    assert thread.native_id
    until_asleep(os.getpid(), thread.native_id)
    stranger.lose("nobody waits for it")
    assert thread.is_alive()
    {"own": own, "peer": peer, "child": child}[whose].lose("gone")
    thread.join()
    assert outcomes == [2]
    memory.store(0, 1)
    assert memory.wait(0, 1, 0.0, peer) == 0  # what arrived counts more than what was lost


def wait_for(liveness: Liveness) -> None:
    word = Memory.wrap(bytearray(8))
    word.bind(liveness)
    assert word.wait(0, 1, SECONDS) == 2


def test_the_monitor_ends_the_life_of_a_socket_that_hangs_up() -> None:
    monitor = Monitor()
    pairs = [socket.socketpair() for _ in range(3)]
    lives = [Liveness() for _ in pairs]
    for (mine, _), liveness in zip(pairs, lives, strict=True):
        monitor.watch(mine.fileno(), liveness)
    pairs[1][1].send(b"data is no hang-up")
    pairs[0][1].close()
    wait_for(lives[0])
    monitor.forget(pairs[1][0].fileno())
    pairs[1][1].close()
    pairs[2][1].shutdown(socket.SHUT_WR)
    wait_for(lives[2])
    assert not lives[1].lost
    for sockets in pairs:
        for each in sockets:
            each.close()
    monitor.close()
    monitor.close()


def test_a_number_used_again_is_another_socket() -> None:
    monitor = Monitor()
    for _ in range(200):
        first, second = socket.socketpair()
        number = first.fileno()
        gone, here = Liveness(), Liveness()
        monitor.watch(number, gone)
        second.close()  # the event may be on its way
        monitor.forget(number)
        first.close()
        third, fourth = socket.socketpair()
        monitor.watch(third.fileno(), here)
        last = Liveness()
        with socket.socket() as unconnected:
            monitor.watch(unconnected.fileno(), last)  # hung up from the start: everything before it was handled
            wait_for(last)
        assert not here.lost
        monitor.forget(third.fileno())
        third.close()
        fourth.close()
    monitor.close()


def test_a_closed_monitor_watches_nothing() -> None:
    monitor = Monitor()
    monitor.close()
    with socket.socket() as sock, pytest.raises(OSError):
        monitor.watch(sock.fileno(), Liveness())
    monitor.forget(0)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(1 << 20):
        data += part
    return data


def test_beats_and_frames_never_interleave(in_thread: InThread) -> None:
    ours, theirs = socket.socketpair()
    beat, frames, rounds = b"B" * 7, 4, 50
    heartbeat = Heartbeat(ours.fileno(), beat, 1e-4)
    results: list[int] = []

    def send(i: int) -> None:
        for _ in range(rounds):
            results.append(heartbeat.send(bytes([i]) * 30_000, SECONDS))

    senders = [in_thread(lambda i=i: send(i)) for i in range(frames)]

    def finish() -> None:
        for sender in senders:
            sender.join()
        heartbeat.close()
        heartbeat.close()
        ours.close()

    in_thread(finish)
    data = read_all(theirs)
    theirs.close()
    assert results == [0] * frames * rounds
    counts = dict.fromkeys([*range(frames), ord("B")], 0)
    while data:
        kind = data[0]
        length = len(beat) if kind == ord("B") else 30_000
        assert data[:length] == bytes([kind]) * length
        counts[kind] += 1
        data = data[length:]
    assert counts.pop(ord("B")) > 0
    assert set(counts.values()) == {rounds}


def test_beats_come_by_themselves() -> None:
    ours, theirs = socket.socketpair()
    heartbeat = Heartbeat(ours.fileno(), b"beat", 1e-3)
    assert theirs.recv(12, socket.MSG_WAITALL) == b"beat" * 3
    heartbeat.close()
    ours.close()
    theirs.close()


def test_a_dead_socket_is_an_errno() -> None:
    ours, theirs = socket.socketpair()
    heartbeat = Heartbeat(ours.fileno(), b"beat", 3600.0)
    assert heartbeat.send(b"frame", SECONDS) == 0
    theirs.close()
    assert heartbeat.send(b"frame", SECONDS) in (errno.EPIPE, errno.ECONNRESET)
    assert heartbeat.send(b"frame", SECONDS) == errno.EPIPE
    heartbeat.close()
    ours.close()


def test_a_frame_that_cannot_be_sent_in_time_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    heartbeat = Heartbeat(ours.fileno(), b"beat", 3600.0)
    assert heartbeat.send(bytes(64 << 20), 0.01) == errno.ETIMEDOUT
    assert heartbeat.send(b"frame", SECONDS) == errno.EPIPE  # half a frame was sent: nothing may follow
    data = read_all(theirs)
    assert 0 < len(data) < 64 << 20
    heartbeat.close()
    ours.close()
    theirs.close()
