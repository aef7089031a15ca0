"""Ten thousand rounds of allocating, registering and freeing leave nothing: descriptors, mappings, resident bytes."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tensorwire.device import Channel, Device, LoopbackDevice, ShmDevice, TcpDevice
from tensorwire.testing.patience import patient

KINDS = {"loopback": LoopbackDevice, "shm": ShmDevice, "tcp": TcpDevice}
ROUNDS, WARM_UP = 10_000, 1_000
NBYTES = 16_384
# Some come and go with the allocators of C and Python; what grew with the rounds would be hundreds of times as much.
FEW_MAPPINGS, FEW_BYTES = 8, 2 << 20
SECONDS = patient(60.0)


@dataclass(frozen=True)
class Held:
    """What this process has of the kernel."""

    descriptors: int
    mappings: int
    resident: int

    @classmethod
    def now(cls) -> Held:
        """Right now, with garbage collected."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        mappings = Path("/proc/self/maps").read_text().count("\n")
        return cls(len(list(Path("/proc/self/fd").iterdir())), mappings, pages * os.sysconf("SC_PAGE_SIZE"))


def one_round(number: int, device: Device, peer: Device, channel: Channel) -> None:
    """A region that a peer may reach, and one that is only a source; every eighth time they are used."""
    with peer.allocate(NBYTES) as target, device.register(bytearray(NBYTES)) as source:
        remote = target.remote()
        if number % 8 == 0:
            channel.write(source.view(), remote.view(), (remote.view(0, 8), 1)).wait(SECONDS)
            target.wait(0, 1, SECONDS)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_grows(kind: str) -> None:
    with KINDS[kind]() as device, KINDS[kind]() as peer, device.connect(peer.address) as channel:
        for number in range(WARM_UP):
            one_round(number, device, peer, channel)
        before = Held.now()
        for number in range(ROUNDS):
            one_round(number, device, peer, channel)
        one_round(0, device, peer, channel)  # a shm channel lets go of closed regions when it maps another
        after = Held.now()
    assert after.descriptors <= before.descriptors
    assert after.mappings <= before.mappings + FEW_MAPPINGS
    assert after.resident <= before.resident + FEW_BYTES
