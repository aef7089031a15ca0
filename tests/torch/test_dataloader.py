"""A data loader's workers beside transfers on every device: forked or spawned, they disturb nothing and use nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tensorwire.device import Channel, Device, LoopbackDevice, Region, RemoteRegion, ShmDevice, TcpDevice
from tensorwire.errors import PeerLost
from tensorwire.testing.patience import patient

SECONDS = patient(60.0)
NBYTES = 1 << 20
ITEMS = 24


@dataclass(frozen=True)
class Transfer:
    """One way between two devices of this process."""

    device: Device
    channel: Channel
    source: Region
    target: Region
    remote: RemoteRegion

    def round(self, number: int) -> None:
        np.frombuffer(self.source, np.uint8)[8:] = number % 251
        self.channel.write(self.source.view(8), self.remote.view(8), (self.remote.view(0, 8), number)).wait(SECONDS)
        self.target.wait(0, number, SECONDS)
        assert np.all(np.frombuffer(self.target, np.uint8)[8:] == number % 251)

    def misuse(self) -> None:
        """What a worker may try: every use says why it cannot be, and a close closes nothing."""
        uses: list[Callable[[], object]] = [
            lambda: self.channel.write(self.source.view(), self.remote.view()).wait(SECONDS),
            lambda: self.channel.signal(self.remote.view(0, 8), 2**63).wait(SECONDS),
            lambda: self.channel.fetch_add(self.remote.view(0, 8), 1),
            lambda: self.target.wait(0, 2**63, SECONDS),
            lambda: self.device.allocate(8),
            lambda: self.device.connect(self.device.address),
        ]
        for use in uses:
            with pytest.raises(PeerLost, match="forked child"):
                use()
        self.channel.close()
        self.device.close()


@pytest.fixture
def transfers() -> Iterator[list[Transfer]]:
    with contextlib.ExitStack() as stack:
        made = []
        for kind in (LoopbackDevice, ShmDevice, TcpDevice):
            device, other = stack.enter_context(kind()), stack.enter_context(kind())
            channel = stack.enter_context(device.connect(other.address))
            source, target = device.allocate(NBYTES), other.allocate(NBYTES)
            made.append(Transfer(device, channel, source, target, target.remote()))
        yield made


class Items(Dataset[torch.Tensor]):
    """Numbers, made by workers that first do what they are told."""

    def __init__(self, first: Callable[[], object]) -> None:
        self.first = first

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        self.first()
        return torch.full((4096,), index)


def nothing() -> None:
    """A spawned worker has nothing of its parent's to misuse: a device cannot even be sent to it."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12: of a fork beside threads
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_beside_transfers(transfers: list[Transfer], context: str) -> None:
    stop = threading.Event()
    rounds, errors = [0], []

    def transfer() -> None:
        try:
            while not stop.is_set():
                rounds[0] += 1
                for each in transfers:
                    each.round(rounds[0])
        except BaseException as error:
            errors.append(error)

    def misuse() -> None:
        for each in transfers:
            each.misuse()

    thread = threading.Thread(target=transfer)
    thread.start()
    try:
        for _ in range(5 if context == "fork" else 1):  # epochs: new workers each time
            items = Items(misuse if context == "fork" else nothing)
            loader = DataLoader(items, batch_size=4, num_workers=2, multiprocessing_context=context, timeout=SECONDS)
            assert sorted(int(row[0]) for batch in loader for row in batch) == list(range(ITEMS))
    finally:
        stop.set()
        thread.join(SECONDS)
    assert not errors
    assert rounds[0] > 1
    for each in transfers:
        assert not each.channel.lost
        each.round(rounds[0] + 1)
        with pytest.raises(TypeError, match="pickle"):
            torch.multiprocessing.reducer.ForkingPickler.dumps(each.device)
