"""Queue pairs: what signals rely on, lanes, credits, splitting, batches, and pairs made anew after a refusal."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorwire.device import Channel, Region, VerbsDevice
from tensorwire.device.verbs.device import VerbsChannel
from tensorwire.device.verbs.queue_pair import RECEIVES, SENDS
from tensorwire.errors import ArgumentError, PeerLost, RemoteAccessError
from tensorwire.observe import counters
from tensorwire.observe.counting import Counters
from tensorwire.testing.patterns import SECONDS, array, pattern
from tensorwire.testing.peer import Peer
from tensorwire.testing.spec import DeviceSpec
from tests.rdma.wire import ADDRESSES

MANY = 3 * RECEIVES


@contextlib.contextmanager
def cable(**options: Any) -> Iterator[tuple[VerbsDevice, VerbsDevice, VerbsChannel]]:
    """Devices on both ends of the cable, and a channel from the first to the second."""
    a, b = (
        VerbsDevice(port, interface=interface, **options)
        for port, interface in zip(("rxa", "rxb"), ADDRESSES, strict=True)
    )
    with a, b, a.connect(b.address) as channel:
        assert isinstance(channel, VerbsChannel)
        yield a, b, channel


def not_ready() -> int:
    """How often a port found no receive for what arrived, or was told so, since it came up."""
    found = 0
    for port in Path("/sys/class/infiniband").iterdir():
        for name in ("rcvd_rnr_err", "send_rnr_err", "retry_rnr_exceeded_err"):
            with contextlib.suppress(FileNotFoundError):
                found += int((port / "ports/1/hw_counters" / name).read_text())
    return found


@pytest.mark.parametrize("signals", ["immediate", "write", "tail"])
def test_every_kind_of_signal_comes_behind_its_payload(signals: Any) -> None:
    nbytes, rounds = 70_001 * 8, 12
    with cable(signals=signals) as (a, b, channel):
        region, source = b.allocate(nbytes + 8), a.allocate(nbytes)
        remote = region.remote()
        payload, word = remote.view(0, nbytes), remote.view(nbytes, 8)  # where a tail lies behind it
        for i in range(1, rounds + 1):
            array(source)[:] = pattern(i, nbytes)
            sent = channel.write(source.view(), payload, (word, i))
            region.wait(nbytes, i, SECONDS)
            assert np.array_equal(array(region)[:nbytes], pattern(i, nbytes))
            sent.wait(SECONDS)
        channel.signal(word, rounds + 1)
        region.wait(nbytes, rounds + 1, SECONDS)


@pytest.mark.parametrize("signals", ["immediate", "write"])
def test_a_sleeper_is_woken(signals: Any) -> None:
    with cable(signals=signals) as (_, b, channel):
        region = b.allocate(64)
        woken = [threading.Thread(target=region.wait, args=(8 * i, 1, SECONDS)) for i in range(8)]
        for thread in woken:
            thread.start()
        for i in reversed(range(8)):
            channel.signal(region.remote().view(8 * i, 8), 1)
        for thread in woken:
            thread.join(SECONDS)
            assert not thread.is_alive()


def test_no_signal_ever_finds_the_target_unready() -> None:
    """More signals than receives, to a target whose Python does nothing but its own attendance; no retry was needed."""
    before = not_ready()
    with cable() as (_, b, channel):
        region = b.allocate(8)
        word = region.remote().view()
        posted = [channel.signal(word, i) for i in range(1, MANY + 1)]
        for completion in posted:
            completion.wait(SECONDS)
        assert region.load(0) == MANY
    assert not_ready() == before


def test_a_stopped_target_holds_signals_back_and_nothing_else() -> None:
    spec, before = DeviceSpec("tests.rdma.devices:either"), not_ready()
    with spec.make() as device, Peer(spec) as peer, device.connect(peer.address) as channel:
        remote, source = peer.allocate(64), device.allocate(64)
        array(source)[:] = 3
        peer.stop()
        posted = []
        thread = threading.Thread(
            target=lambda: posted.extend(channel.signal(remote.view(0, 8), i) for i in range(1, MANY + 1))
        )
        thread.start()
        thread.join(1.0)
        assert thread.is_alive(), "more signals left than the target had receives"
        peer.resume()
        thread.join(SECONDS)
        posted[-1].wait(SECONDS)
        assert peer.call("content", remote.key, 0, 8) == MANY.to_bytes(8, "little")
        peer.stop()
        channel.write(source.view(8), remote.view(8)).wait(SECONDS)  # needs no receive, and nobody's Python
        back = device.allocate(56)
        channel.read(back.view(), remote.view(8)).wait(SECONDS)
        assert np.all(array(back) == 3)
        peer.resume()
    assert not_ready() == before


def test_lanes_are_queue_pairs_of_their_own() -> None:
    with cable(queue_pairs=3, completion_queues=2) as (a, b, channel):
        assert len(channel.lanes) == 3
        assert channel.lanes[0] is channel
        region, source = b.allocate(8 * 3 + 3000), a.allocate(3000)
        array(source)[:] = pattern(1, 3000)
        remote = region.remote()
        for i, lane in enumerate(channel.lanes):
            part = slice(1000 * i, 1000 * (i + 1))
            lane.write(source.view(1000 * i, 1000), remote.view(24 + part.start, 1000), (remote.view(8 * i, 8), 7))
        for i in range(3):
            region.wait(8 * i, 7, SECONDS, channel)
        assert np.array_equal(array(region)[24:], array(source))
        bad = replace(remote, key=remote.key ^ 1)
        with pytest.raises(RemoteAccessError):
            channel.lanes[1].signal(bad.view(0, 8), 1).wait(SECONDS)
        for lane in channel.lanes:  # the others did not notice, and that one was made anew
            lane.signal(remote.view(0, 8), 9).wait(SECONDS)


def small_messages(channel: VerbsChannel, largest: int) -> None:
    """As if the port carried no larger ones: then tests need no gigabytes."""
    channel._pair._largest = largest


def test_a_message_above_the_ports_largest_is_split() -> None:
    nbytes = 1_000_003  # over a hundred pieces: more than one operation holds
    with cable() as (a, b, channel):
        small_messages(channel, 8192)
        region, source, back = b.allocate(nbytes + 13), a.allocate(nbytes), a.allocate(nbytes)
        array(source)[:] = pattern(5, nbytes)
        remote = region.remote()
        channel.write(source.view(), remote.view(8, nbytes), (remote.view(0, 8), 4)).wait(SECONDS)
        region.wait(0, 4, SECONDS)
        assert np.array_equal(array(region)[8 : 8 + nbytes], array(source))
        assert not array(region)[8 + nbytes :].any()
        channel.read(back.view(), remote.view(8, nbytes)).wait(SECONDS)
        assert np.array_equal(array(back), array(source))


def test_a_refused_part_keeps_the_later_ones_and_the_signal_back() -> None:
    nbytes = 1_000_000
    with cable() as (a, b, channel):
        small_messages(channel, 4096)
        region, source = b.allocate(nbytes // 2), a.allocate(nbytes)
        flag, guard = b.allocate(8), b.allocate(8)
        array(source)[:] = 1
        longer = replace(region.remote(), length=nbytes)
        refused = channel.write(source.view(), longer.view(), (flag.remote().view(), 1))
        after = channel.signal(guard.remote().view(), 2)
        with pytest.raises(RemoteAccessError):
            refused.wait(SECONDS)
        after.wait(SECONDS)
        assert (flag.load(0), guard.load(0)) == (0, 2)


def test_a_batch_is_one_completion_and_keeps_its_order() -> None:
    count = SENDS + 100  # also more than the queue holds
    with cable() as (a, b, channel):
        region, source = b.allocate(8 * count), a.allocate(8 * count)
        array(source).view(np.uint64)[:] = np.arange(1, count + 1)
        remote = region.remote()
        with channel.batch():
            posted = [channel.write(source.view(8 * i, 8), remote.view(8 * i, 8)) for i in range(count)]
            posted[3].wait(SECONDS)  # does not wait for the end
            last = channel.signal(remote.view(0, 8), 77)
        last.wait(SECONDS)
        assert all(each.done for each in posted)
        assert region.load(0) == 77
        assert np.array_equal(array(region).view(np.uint64)[1:], array(source).view(np.uint64)[1:])


def test_a_refusal_in_a_batch_hits_only_itself() -> None:
    with cable() as (a, b, channel):
        region, source = b.allocate(800), a.allocate(800)
        array(source).view(np.uint64)[:] = np.arange(1, 101)
        remote = region.remote()
        bad = replace(remote, key=remote.key ^ 1)
        with channel.batch():
            posted = [
                channel.write(source.view(8 * i, 8), (bad if i in (20, 21, 60, 99) else remote).view(8 * i, 8))
                for i in range(100)
            ]
        for i, completion in enumerate(posted):
            with pytest.raises(RemoteAccessError) if i in (20, 21, 60, 99) else contextlib.nullcontext():
                completion.wait(SECONDS)
        want = np.arange(1, 101)
        want[[20, 21, 60, 99]] = 0
        assert np.array_equal(array(region).view(np.uint64), want)


def test_a_pair_made_anew_again_and_again() -> None:
    with cable() as (_, b, channel):
        region = b.allocate(8)
        remote = region.remote()
        bad = replace(remote, key=remote.key ^ 1)
        for i in range(1, 21):
            refused, good = channel.signal(bad.view(), i), channel.signal(remote.view(), i)
            with pytest.raises(RemoteAccessError):
                refused.wait(SECONDS)
            good.wait(SECONDS)
            assert region.load(0) == i
        for i in range(MANY):  # its credits are whole
            last = channel.signal(remote.view(), 100 + i)
        last.wait(SECONDS)


def uses(channel: Channel, mine: Region, remote: Any) -> list[Callable[[], object]]:
    return [
        lambda: channel.write(mine.view(), remote.view(), (remote.view(0, 8), 1)).wait(SECONDS),
        lambda: channel.read(mine.view(), remote.view()).wait(SECONDS),
        lambda: channel.fetch_add(remote.view(0, 8), 1),
    ]


@pytest.mark.parametrize("step", ["create", "add"])
def test_a_pair_made_anew_while_its_channel_is_lost(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits may find the loss, and destroy the pair, at any moment of its making."""
    with cable() as (a, _, channel):
        nic, pair = a._nic, channel._pair
        free, really = sum(nic._free), getattr(nic, step)
        destroyed = threading.Thread(target=pair.destroy_if_lost)

        def meanwhile(*arguments: Any) -> Any:
            made = really(*arguments)
            channel.liveness.lose("the test says so")
            destroyed.start()
            destroyed.join(0.2)  # it may have to wait for us
            return made

        pair.reset()
        monkeypatch.setattr(nic, step, meanwhile)
        end = pair.prepare()
        with pytest.raises(PeerLost, match="the test says so"):
            pair.connect(end, RECEIVES, timeout=14, retries=6)
        destroyed.join(SECONDS)
        assert not destroyed.is_alive()
        with pytest.raises(PeerLost, match="the test says so"):
            pair.prepare()
        pair.destroy()  # as its connection does whatever came of it
        assert not nic._pairs
        assert sum(nic._free) > free


def test_a_peer_killed_in_the_middle_of_transfers() -> None:
    spec = DeviceSpec("tests.rdma.devices:either")
    with spec.make() as device, Peer(spec) as peer, device.connect(peer.address) as channel:
        remote, source = peer.allocate(32 << 20), device.allocate(32 << 20)
        posted = [channel.write(source.view(), remote.view(), (remote.view(0, 8), i)) for i in range(20)]
        posted.append(channel.read(source.view(), remote.view()))
        posted[0].wait(SECONDS)
        peer.kill()
        with pytest.raises(PeerLost):
            posted[-1].wait(SECONDS)
        assert all(each.done for each in posted)
        array(source)[:] = 1  # nothing reads or fills it any more
        assert not channel._pair._pending
        for use in uses(channel, source, remote):
            with pytest.raises(PeerLost):
                use()
        assert np.all(array(source) == 1)


def test_memory_of_another_device_is_refused() -> None:
    with cable() as (_, b, channel):
        region = b.allocate(8)
        with pytest.raises(ArgumentError, match="its own device"):
            channel.write(region.view(), region.remote().view())


def test_steady_state_costs_nothing_but_messages() -> None:
    with cable() as (a, b, channel):
        region, source = b.allocate(4096), a.allocate(4096)
        target, word = region.remote().view(), region.remote().view(0, 8)
        channel.write(source.view(), target, (word, 1)).wait(SECONDS)
        before = counters.snapshot()
        for i in range(2, 52):
            channel.write(source.view(), target, (word, i))
            region.wait(0, i, SECONDS)
        assert counters.since(before) == Counters(messages=50, bytes=50 * 4096)


def test_settings_that_make_no_sense_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"queue_pairs": 0}, {"completion_queues": 65}, {"signals": "smoke"}, {"retries": 8}, {"timeout_exponent": 0},
        {"heartbeat": 0},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(ArgumentError, match="verbs: "):
            VerbsDevice(**options)
    with pytest.warns(UserWarning, match="never report"):
        VerbsDevice("rxa", retries=7).close()
