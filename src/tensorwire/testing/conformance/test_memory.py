"""Regions: zeroed, aligned, refused in time, and shown to peers by capabilities that differ."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from tensorwire.device.region import Access
from tensorwire.device.verbs.registrations import pinned_bytes
from tensorwire.errors import OutOfMemory
from tensorwire.testing.fixtures import Pair
from tensorwire.testing.patterns import array, resident
from tensorwire.testing.spec import DeviceSpec


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_memory_is_zeroed_aligned_and_writable(spec: DeviceSpec) -> None:
    with spec.make() as device:
        for nbytes in (0, 1, 4096, 4097, 1 << 20):
            for alignment in (1, 64, 4096):
                region = device.allocate(nbytes, alignment)
                assert len(region) == region.nbytes == nbytes
                assert nbytes == 0 or region.address % alignment == 0
                assert not array(region).any()
                array(region)[:] = 255


def test_an_array_outlives_its_region_and_its_device(spec: DeviceSpec) -> None:
    with spec.make() as device:
        here = array(device.allocate(4096))
        there = np.from_dlpack(device.allocate(4096))
        here[:] = there[:] = 7
    gc.collect()
    assert here.sum() == there.sum() == 7 * 4096


@pytest.mark.parametrize("nbytes", [1 << 46, 1 << 56, (1 << 56) + 1, 1 << 62, 2**64 - 1, 2**64, 2**80])
def test_absurd_sizes_are_out_of_memory(spec: DeviceSpec, nbytes: int) -> None:
    with spec.make() as device:
        with pytest.raises(OutOfMemory, match=str(nbytes)):
            device.allocate(nbytes)
        assert device.allocate(8).nbytes == 8


def test_more_than_the_machine_has_is_out_of_memory(spec: DeviceSpec) -> None:
    available = int(Path("/proc/meminfo").read_text().partition("MemTotal:")[2].split()[0]) * 1024
    with spec.make() as device, pytest.raises(OutOfMemory):
        device.allocate(available + (64 << 20))


def test_a_capability_is_the_same_each_time_and_another_for_each_access(spec: DeviceSpec) -> None:
    with spec.make() as device, device.allocate(64) as region:
        accesses: tuple[Access, ...] = ("read", "write")
        for access in accesses:
            remote = region.remote(access)
            assert remote == region.remote(access)
            assert (remote.device, remote.length, remote.access) == (device.name, 64, access)
        assert region.remote("read").key != region.remote("write").key


def test_allocating_and_dropping_keeps_memory_flat(pair: Pair) -> None:
    """Ten thousand rounds; every other region was shown to nobody, and is not even closed."""

    def rounds(count: int) -> None:
        for i in range(count):
            region = pair.target.allocate(4096)
            pair.initiator.register(bytearray(100))
            if i % 2:
                region.remote("read")
                region.close()

    rounds(1000)
    gc.collect()
    before, held, pinned = resident(), descriptors(), pinned_bytes()
    rounds(9000)
    gc.collect()
    assert descriptors() <= held
    assert pinned_bytes() <= pinned
    assert resident() - before < 4 << 20
