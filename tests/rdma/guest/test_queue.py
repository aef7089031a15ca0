"""Queue pairs of a real port: what signals rely on, credits, and pairs made anew after a refusal.

What the stand-in for a NIC shows as well is in tests/device/verbs; the conformance suite also runs here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorwire.device import VerbsDevice
from tensorwire.device.verbs.device import VerbsChannel
from tensorwire.device.verbs.queue_pair import RECEIVES
from tensorwire.errors import ArgumentError, PeerLost, RemoteAccessError
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


def test_memory_of_another_device_is_refused() -> None:
    with cable() as (_, b, channel):
        region = b.allocate(8)
        with pytest.raises(ArgumentError, match="its own device"):
            channel.write(region.view(), region.remote().view())


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
