"""Registered memory on a real (if emulated) NIC: what is pinned, by the kernel's count, and what a fork does to it."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tensorwire.device import Channel, Device, Region, RemoteRegion
from tensorwire.device.verbs.registrations import pinned_bytes
from tensorwire.device.verbs.slabs import SLAB
from tensorwire.errors import ArgumentError, OutOfMemory, PeerLost, RemoteAccessError
from tensorwire.observe import counters
from tests.rdma.devices import either

SECONDS = 60.0
NBYTES = 1 << 16


@dataclass(frozen=True)
class Transfer:
    """One way between two devices of this process, across the cable."""

    device: Device
    other: Device
    channel: Channel

    def send(self, source: Region, remote: RemoteRegion) -> None:
        self.channel.write(source.view(), remote.view()).wait(SECONDS)


@pytest.fixture
def transfer() -> Iterator[Transfer]:
    with either() as device, either() as other, device.connect(other.address) as channel:
        yield Transfer(device, other, channel)


def array(memory: object) -> np.ndarray:
    return np.frombuffer(memory, np.uint8)  # type: ignore[call-overload, no-any-return]


def test_what_is_pinned_stays_flat_and_steady_state_registers_nothing(transfer: Transfer) -> None:
    """The conformance suite does ten thousand rounds of this."""
    kept, landing = np.zeros(4096, np.uint8), transfer.other.allocate(4096)
    remote = landing.remote()

    def rounds(count: int) -> None:
        for i in range(count):
            region = transfer.device.allocate(4096)
            transfer.device.register(bytearray(100))
            lent = transfer.device.register(kept)
            if i % 100 == 0:
                kept[:] = i // 100 + 1
                transfer.send(lent, remote)
                assert np.array_equal(array(landing), kept)
            if i % 2:
                region.remote("read")
                region.close()

    rounds(100)
    gc.collect()
    before, counted = pinned_bytes(), counters.snapshot()
    assert before >= 2 * SLAB
    rounds(1000)
    gc.collect()
    assert pinned_bytes() == before
    assert counters.since(counted).registrations == 1000 + 500, "an allocation, or a kept array, was registered"


def test_what_is_freed_and_what_takes_its_place(transfer: Transfer) -> None:
    """The allocator hands out the same addresses again: never is the NIC's old idea of them used."""
    landing = transfer.other.allocate(NBYTES)
    remote = landing.remote()
    seen: set[int] = set()
    again = 0
    for i in range(200):
        source = np.full(NBYTES, i % 251, np.uint8)
        again += source.ctypes.data in seen
        seen.add(source.ctypes.data)
        transfer.send(transfer.device.register(source), remote)
        assert np.all(array(landing) == i % 251)
        del source
    assert again


def test_a_closed_region_is_refused_by_the_nic_and_its_neighbours_are_not(transfer: Transfer) -> None:
    regions = [transfer.other.allocate(4096) for _ in range(3)]
    assert regions[1].address - regions[0].address == 4096, "they lie in one slab"
    remotes = [region.remote() for region in regions]
    source = transfer.device.allocate(4096)
    array(source)[:] = 7
    regions[1].close()
    with pytest.raises(RemoteAccessError):
        transfer.send(source, remotes[1])
    past = RemoteRegion("verbs", remotes[0].key, 8192, "write", remotes[0].address)
    with pytest.raises(RemoteAccessError):
        transfer.channel.write(source.view(), past.view(4096, 4096)).wait(SECONDS)
    for i in (0, 2):
        transfer.send(source, remotes[i])
    assert [int(array(region).sum()) for region in regions] == [7 * 4096, 0, 7 * 4096]


def test_read_only_memory_is_a_source_and_no_target(transfer: Transfer) -> None:
    content = bytes(range(256)) * 16
    lent, landing = transfer.device.register(content), transfer.other.allocate(4096)
    transfer.send(lent, landing.remote())
    assert bytes(array(landing)) == content
    with pytest.raises(ArgumentError, match="read-only"):
        lent.remote("write")
    with pytest.raises(ArgumentError, match="read-only"):
        transfer.channel.read(lent.view(), landing.remote().view())


def test_a_small_memlock_is_said_and_leaves_nothing(transfer: Transfer) -> None:
    """The limit does not bind those with CAP_IPC_LOCK, which goes with root's user id."""
    before = pinned_bytes()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (NBYTES, NBYTES))
    os.setresuid(65534, 65534, 0)
    try:
        with pytest.raises(OutOfMemory, match=r"RLIMIT_MEMLOCK\) is 65536 bytes.*ulimit -l unlimited"):
            transfer.device.allocate(2 * SLAB)
        with pytest.raises(OutOfMemory, match="ulimit -l unlimited"):
            transfer.device.register(bytearray(2 * SLAB))
    finally:
        os.setresuid(0, 0, 0)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    gc.collect()
    assert pinned_bytes() == before
    transfer.device.allocate(2 * SLAB)


def misuse(transfer: Transfer, source: Region, remote: RemoteRegion) -> None:
    """What a worker may try: every use says why it cannot be, and a close closes nothing."""
    uses: list[Callable[[], object]] = [
        lambda: transfer.channel.write(source.view(), remote.view()).wait(SECONDS),
        lambda: transfer.channel.signal(remote.view(0, 8), 2**63).wait(SECONDS),
        lambda: transfer.channel.fetch_add(remote.view(0, 8), 1),
        lambda: source.wait(0, 2**63, SECONDS),
        lambda: transfer.device.allocate(8),
        lambda: transfer.device.connect(transfer.other.address),
    ]
    for use in uses:
        with pytest.raises(PeerLost, match="forked child"):
            use()
    transfer.channel.close()
    transfer.device.close()
    transfer.other.close()
    gc.collect()


def test_workers_of_a_data_loader_beside_transfers(transfer: Transfer) -> None:
    """Forked workers misuse and drop everything of their parent's, and the parent goes on, with its pinned memory."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Items(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            misuse(transfer, source, remote)
            return torch.full((4096,), index)

    source, landing = transfer.device.allocate(NBYTES), transfer.other.allocate(NBYTES)
    lent = transfer.device.register(np.zeros(NBYTES, np.uint8))
    remote = landing.remote()
    before = pinned_bytes()
    taken: list[int] = []
    for batch in DataLoader(Items(), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=SECONDS):
        taken += [int(row[0]) for row in batch]
        for each in (source, lent):
            array(each)[:] = len(taken)
            transfer.send(each, remote)
            assert np.all(array(landing) == len(taken))
    assert sorted(taken) == list(range(8))
    assert pinned_bytes() == before
