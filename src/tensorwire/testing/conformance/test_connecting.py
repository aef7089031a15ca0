"""Which peers can be reached, and how attempts to reach others end."""

from __future__ import annotations

import pytest

from tensorwire.errors import ArgumentError, PeerLost
from tensorwire.testing.fixtures import InThread, Pair
from tensorwire.testing.patterns import GONE, SECONDS, noise
from tensorwire.testing.peer import Peer
from tensorwire.testing.spec import DeviceSpec


def test_a_device_that_is_gone_cannot_be_reached(spec: DeviceSpec) -> None:
    with spec.make() as device:
        address = device.address
    with spec.make() as other:
        with pytest.raises(GONE):
            other.connect(address, timeout=SECONDS)
        with pytest.raises(PeerLost):
            device.connect(other.address, timeout=SECONDS)


def test_many_connect_at_once(spec: DeviceSpec, in_thread: InThread) -> None:
    with spec.make() as device, spec.make() as other:
        region = device.allocate(16 * 8)

        def connect(i: int) -> None:
            for _ in range(5):
                with other.connect(device.address) as channel:
                    channel.signal(region.remote().view(i * 8, 8), 1).wait(SECONDS)

        for thread in [in_thread(connect, i) for i in range(16)]:
            thread.join()
        assert bytes(region) == (1).to_bytes(8, "little") * 16


def test_an_address_of_another_kind_is_refused(pair: Pair) -> None:
    for address in (b"", b"nonsense", noise(48).tobytes()):
        with pytest.raises((ArgumentError, ConnectionError)):
            pair.initiator.connect(address)


def test_a_device_may_connect_to_itself(spec: DeviceSpec) -> None:
    with spec.make() as device, device.connect(device.address) as channel:
        region, source = device.allocate(100), device.register(bytes(range(100)))
        channel.write(source.view(), region.remote().view()).wait(SECONDS)
        assert bytes(region) == bytes(range(100))


def test_a_peer_that_comes_back_is_another_one(far_spec: DeviceSpec) -> None:
    """The old channel stays lost, and a new one works beside it."""
    with far_spec.make() as device:
        with Peer(far_spec) as first:
            old = device.connect(first.address)
            old.signal(first.allocate(8).view(), 1).wait(SECONDS)
            first.kill()
        with Peer(far_spec) as second, device.connect(second.address) as channel:
            remote = second.allocate(8)
            channel.signal(remote.view(), 2).wait(SECONDS)
            assert second.call("content", remote.key, 0, 1) == b"\x02"
            with pytest.raises(PeerLost):
                old.signal(remote.view(), 3).wait(SECONDS)
            assert old.lost
            assert not channel.lost
        old.close()
