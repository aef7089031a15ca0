"""Order on a channel, seen by a reader that races with the writer."""

from __future__ import annotations

import os

import numpy as np

from tensorwire.device import Channel, Device, RemoteRegion
from tensorwire.testing.fixtures import FarPair, InThread, Pair
from tensorwire.testing.patterns import HEAD, SECONDS, Plan, array, pattern, verify

STREAMING = 16 << 20  # where copies change, unless this processor was measured
SIZES = [1, 8, 4097, 65536, STREAMING, 63, (1 << 20) + 5, STREAMING + 77, 300_001, STREAMING + 16] * 2


def layout() -> tuple[Plan, int]:
    """(signal value, offset, size) of each payload, side by side at odd places, and the bytes of it all."""
    plan, at = [], HEAD
    for i, nbytes in enumerate(SIZES, 1):
        plan.append((i, at, nbytes))
        at += nbytes + i % 3
    return plan, at


def send(device: Device, channel: Channel, remote: RemoteRegion, plan: Plan, total: int) -> None:
    """Every payload with its signal; each third one in two halves and a signal alone."""
    source = device.allocate(total)
    here = array(source)
    for i, offset, nbytes in plan:
        here[offset : offset + nbytes] = pattern(i, nbytes)
    completions = []
    for i, offset, nbytes in plan:
        word = remote.view(0, 8)
        if i % 3:
            completions.append(
                channel.write(source.view(offset, nbytes), remote.view(offset, nbytes), signal=(word, i))
            )
            continue
        half = nbytes // 2
        for at, length in ((offset + half, nbytes - half), (offset, half)):
            completions.append(channel.write(source.view(at, length), remote.view(at, length)))
        completions.append(channel.signal(word, i))
    for completion in completions:
        completion.wait(SECONDS)


def test_a_visible_signal_means_a_whole_payload(far: FarPair) -> None:
    plan, total = layout()
    remote = far.peer.allocate(total)
    far.channel.signal(remote.view(0, 8), 0).wait(SECONDS)  # mapped and warm: the race is in the payloads
    far.peer.start("verify", remote.key, plan)
    send(far.device, far.channel, remote, plan, total)
    assert far.peer.finish() == len(plan)


def test_a_visible_signal_means_a_whole_payload_within_a_process(pair: Pair, in_thread: InThread) -> None:
    plan, total = layout()
    region = pair.target.allocate(total)
    in_thread(lambda: verify(region, plan))
    send(pair.initiator, pair.channel, region.remote(), plan, total)


def test_a_later_write_is_never_seen_before_an_earlier_one(far: FarPair) -> None:
    rounds, nbytes = 200, 4096
    remote = far.peer.allocate(HEAD + (rounds + 1) * nbytes)
    source = far.device.allocate(rounds * 8 + (rounds + 1) * nbytes)
    words, payloads = array(source)[: rounds * 8].view(np.uint64), array(source)[rounds * 8 :]
    words[:] = np.arange(1, rounds + 1)
    payloads.reshape(-1, nbytes)[:] = np.arange(rounds + 1, dtype=np.uint8)[:, None]
    far.channel.signal(remote.view(0, 8), 0).wait(SECONDS)
    far.peer.start("watch_word", remote.key, 0, HEAD, nbytes, rounds)
    completions = []
    for i in range(1, rounds + 1):
        at = i * nbytes
        far.channel.write(source.view(rounds * 8 + at, nbytes), remote.view(HEAD + at, nbytes))
        completions.append(far.channel.write(source.view((i - 1) * 8, 8), remote.view(0, 8)))
    for completion in completions:
        completion.wait(SECONDS)
    assert far.peer.finish() == rounds


def test_the_last_of_several_writes_to_one_place_stays(pair: Pair) -> None:
    nbytes = 70_000
    region, source = pair.target.allocate(nbytes), pair.initiator.allocate(20 * nbytes)
    array(source).reshape(20, nbytes)[:] = np.arange(20, dtype=np.uint8)[:, None]
    for i in range(20):
        completion = pair.channel.write(source.view(i * nbytes, nbytes), region.remote().view())
    completion.wait(SECONDS)
    assert np.all(array(region) == 19)


def test_a_read_sees_every_earlier_write(pair: Pair) -> None:
    nbytes = 1 << 20
    region, source, back = (
        pair.target.allocate(nbytes),
        pair.initiator.allocate(nbytes),
        pair.initiator.allocate(nbytes),
    )
    for i in range(1, 6):
        array(source)[:] = pattern(i, nbytes)
        wrote = pair.channel.write(source.view(), region.remote().view())
        read = pair.channel.read(back.view(), region.remote().view())
        read.wait(SECONDS)
        assert wrote.done
        assert np.array_equal(array(back), pattern(i, nbytes))


def test_a_completed_write_lies_in_the_targets_memory(far: FarPair) -> None:
    remote, source = far.peer.allocate(4096), far.device.allocate(4096)
    for i in range(50):
        array(source)[:] = i
        far.channel.write(source.view(), remote.view()).wait(SECONDS)
        array(source)[:] = 255  # the source may be reused
        assert far.peer.call("content", remote.key, 0, 4096) == bytes([i]) * 4096


def test_a_fence_keeps_a_write_behind_a_read(pair: Pair) -> None:
    n = 4 << 20
    theirs = pair.target.allocate(n)
    array(theirs)[:] = pattern(0, n)
    remote, here, source = theirs.remote(), pair.initiator.allocate(n), pair.initiator.allocate(n)
    for i in range(1, 9):
        array(source)[:] = pattern(i, n)
        read = pair.channel.read(here.view(), remote.view())
        if i % 2:
            write = pair.channel.write(source.view(), remote.view(), fence=True)
        else:
            write = pair.channel.write(source.view(8, n - 8), remote.view(8, n - 8), (remote.view(0, 8), i), fence=True)
        read.wait(SECONDS)
        assert (array(here)[8:] == pattern(i - 1, n)[8:]).all()
        write.wait(SECONDS)


def test_a_fenced_signal_says_that_a_read_is_over(pair: Pair, in_thread: InThread) -> None:
    """A credit: whoever sees it may overwrite what was being read."""
    nbytes, rounds = 2 << 20, 12
    theirs, credit = pair.target.allocate(nbytes), pair.target.allocate(8)
    remote, word = theirs.remote("read"), credit.remote().view()
    here = pair.initiator.allocate(nbytes)
    array(theirs)[:] = 0

    def overwrite() -> None:
        for i in range(1, rounds + 1):
            credit.wait(0, i, SECONDS)
            array(theirs)[:] = i

    in_thread(overwrite)
    for i in range(1, rounds + 1):
        read = pair.channel.read(here.view(), remote.view())
        pair.channel.signal(word, i, fence=True)
        read.wait(SECONDS)
        got = array(here)
        assert got[0] == got[-1]
        assert np.all(got == got[0])
        while theirs.view(nbytes - 1, 1).buffer[0] != i:
            os.sched_yield()
