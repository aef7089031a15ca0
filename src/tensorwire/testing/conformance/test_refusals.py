"""A refusal by the target is a typed error at the initiator; the target's bytes stay, and the channel lives on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tensorwire.device import Region, RemoteRegion
from tensorwire.errors import RegionClosed, RemoteAccessError
from tensorwire.testing.fixtures import FarPair, Pair
from tensorwire.testing.patterns import SECONDS, array, every_use, filled

NBYTES = 8192


def check_refused(pair: Pair, region: Region, remote: RemoteRegion, at: int = 0, *, reads: bool = True) -> None:
    """All of it is refused, changes nothing on either side, and leaves a channel that works."""
    mine = pair.initiator.allocate(NBYTES)
    array(mine)[:] = 5
    before = bytes(region.view().buffer)
    for use in every_use(pair.channel, mine, remote, at, reads=reads):
        with pytest.raises(RemoteAccessError):
            use()
    assert bytes(region.view().buffer) == before
    assert np.all(array(mine) == 5)
    honest = pair.target.allocate(NBYTES)
    completion = pair.channel.write(mine.view(), honest.remote().view(), (remote.view(at, 8), 1))
    for _ in range(2):
        with pytest.raises(RemoteAccessError):
            completion.wait(SECONDS)
    assert completion.done
    if pair.initiator.capabilities.refuses_whole:
        assert not array(honest).any()
    pair.channel.write(mine.view(8), honest.remote().view(8), (honest.remote().view(0, 8), 6)).wait(SECONDS)
    honest.wait(0, 6, SECONDS)
    assert np.all(array(honest)[8:] == 5)
    assert bytes(region.view().buffer) == before


def test_a_wrong_key(pair: Pair) -> None:
    region = filled(pair.target, NBYTES)
    remote = region.remote()
    check_refused(pair, region, replace(remote, key=remote.key ^ 1))


def test_a_key_of_another_device(pair: Pair) -> None:
    region = filled(pair.target, NBYTES)
    with pair.spec.make() as other:
        check_refused(pair, region, other.allocate(NBYTES).remote())


def test_beyond_the_end(pair: Pair) -> None:
    region = filled(pair.target, NBYTES)
    for at in (NBYTES, NBYTES - 8 + 4096 * 8, 2**40, 2**63, 2**64 - 8):
        check_refused(pair, region, replace(region.remote(), length=2**64), at)


def test_across_the_end(pair: Pair) -> None:
    region = filled(pair.target, NBYTES)
    mine, forged = pair.initiator.allocate(NBYTES + 1), replace(region.remote(), length=NBYTES + 1)
    for use in (pair.channel.write(mine.view(), forged.view()), pair.channel.read(mine.view(), forged.view())):
        with pytest.raises(RemoteAccessError):
            use.wait(SECONDS)
    assert np.all(array(region) == 3)


def test_writing_through_a_read_capability(pair: Pair) -> None:
    region = filled(pair.target, NBYTES)
    honest = region.remote("read")
    check_refused(pair, region, honest, reads=False)
    check_refused(pair, region, replace(honest, access="write"), reads=False)
    back = pair.initiator.allocate(NBYTES)
    pair.channel.read(back.view(), honest.view()).wait(SECONDS)
    assert np.all(array(back) == 3)


def test_a_closed_region(pair: Pair) -> None:
    region = filled(pair.target, NBYTES)
    remote, mine = region.remote(), pair.initiator.allocate(8)
    pair.channel.write(mine.view(), remote.view(0, 8)).wait(SECONDS)  # known, and mapped where that is possible
    region.close()
    region.close()
    assert region.closed
    check_refused(pair, region, remote)
    with pytest.raises(RegionClosed):
        region.remote()


def test_a_payload_for_nobody_is_thrown_away(pair: Pair) -> None:
    region = filled(pair.target, NBYTES)
    mine = pair.initiator.allocate(20 << 20)
    forged = replace(region.remote(), length=20 << 20)
    completions = [pair.channel.write(mine.view(), forged.view()) for _ in range(3)]
    good = pair.channel.signal(region.remote().view(0, 8), 2**60)
    for completion in completions:
        with pytest.raises(RemoteAccessError):
            completion.wait(SECONDS)
    good.wait(SECONDS)
    assert region.load(0) == 2**60
    assert np.all(array(region)[8:] == 3)


def test_a_misaligned_word(pair: Pair) -> None:
    if not pair.target.capabilities.shares_registered:
        pytest.skip("this device shows peers page-aligned memory only")
    memory = np.zeros(NBYTES + 8, np.uint8)
    region = pair.target.register(memory[4 - memory.ctypes.data % 4 + 1 :])
    uses = every_use(pair.channel, pair.initiator.allocate(16), region.remote(), 8, reads=False)[1:]
    for use in uses:
        with pytest.raises(RemoteAccessError):
            use()
    mine, honest = pair.initiator.allocate(8), pair.target.allocate(8)
    array(mine)[:] = 1
    with pytest.raises(RemoteAccessError):
        pair.channel.write(mine.view(), honest.remote().view(), (region.remote().view(0, 8), 1)).wait(SECONDS)
    assert not memory.any()
    assert not array(honest).any()


def test_refusals_of_another_process(far: FarPair) -> None:
    writable, readable = far.peer.allocate(NBYTES), far.peer.allocate(NBYTES, "read")
    mine = far.device.allocate(NBYTES)
    closed = far.peer.allocate(NBYTES)
    far.channel.read(mine.view(), closed.view()).wait(SECONDS)
    far.peer.call("close_region", closed.key)
    array(mine)[:] = 5
    for remote, at in (
        (replace(writable, key=writable.key ^ 1), 0),
        (replace(writable, length=2**40), NBYTES),
        (readable, 0),
        (replace(readable, access="write"), 0),
        (closed, 0),
    ):
        for use in every_use(far.channel, mine, remote, at, reads=remote.key != readable.key):
            with pytest.raises(RemoteAccessError):
                use()
    for key in (writable.key, readable.key, closed.key):
        assert far.peer.call("content", key, 0, NBYTES) == bytes(NBYTES)
    far.channel.write(mine.view(), writable.view()).wait(SECONDS)
    assert far.peer.call("content", writable.key, 0, NBYTES) == b"\x05" * NBYTES


def test_a_closed_local_region(pair: Pair) -> None:
    region = filled(pair.target, NBYTES)
    mine = pair.initiator.allocate(8)
    mine.close()
    for use in (
        lambda: pair.channel.write(mine.view(), region.remote().view(0, 8)),
        lambda: pair.channel.read(mine.view(), region.remote().view(0, 8)),
        lambda: mine.remote(),
        lambda: mine.wait(0, 1, SECONDS),
    ):
        with pytest.raises(RegionClosed):
            use()
    assert np.all(array(region) == 3)
