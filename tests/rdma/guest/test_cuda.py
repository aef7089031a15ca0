"""The way of a CUDA tensor's region through a real channel. Its memory is the host's: what stands in for ibverbs.cuda
registers that."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorwire.errors import RegionClosed, RemoteAccessError
from tests.rdma.devices import either

SECONDS = 60.0
NBYTES = 1 << 20


class Tensor:
    """As much of a CUDA tensor as registering takes."""

    is_cuda = True
    device = -1

    def __init__(self, seed: int | None = None) -> None:
        zeros = np.zeros(NBYTES, np.uint8)
        self.array = zeros if seed is None else np.random.default_rng(seed).integers(0, 255, NBYTES, np.uint8)
        self.data_ptr = lambda: self.array.ctypes.data
        self.numel = lambda: NBYTES
        self.element_size = lambda: 1
        self.is_contiguous = lambda: True


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What CUDA was told."""
    told: list[str] = []

    def register(domain: Any, tensor: Tensor, access: int) -> Any:
        return domain.reg_mr(tensor.data_ptr(), NBYTES, access)

    module: Any = ModuleType("ibverbs.cuda")
    module.register_tensor = register
    module.synchronize = lambda: told.append("synchronize")
    module.flush_gpudirect_writes = lambda: told.append("flush")
    monkeypatch.setitem(sys.modules, "ibverbs.cuda", module)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return told


def test_there_and_back_and_the_end(calls: list[str]) -> None:
    with either() as device, either() as other, device.connect(other.address) as channel:
        tensors = SimpleNamespace(source=Tensor(1), target=Tensor(), back=Tensor())
        source: Any = device.register(tensors.source)
        target: Any = other.register(tensors.target)
        back: Any = device.register(tensors.back)
        word = other.allocate(8)
        source.stage()
        channel.write(source.view(), target.remote().view(), (word.remote().view(), 1)).wait(SECONDS)
        word.wait(0, 1, SECONDS)
        target.flush()
        assert np.array_equal(tensors.target.array, tensors.source.array)
        channel.read(back.view(8, 1000), target.remote("read").view(8, 1000)).wait(SECONDS)
        assert np.array_equal(tensors.back.array[8:1008], tensors.source.array[8:1008])
        assert not tensors.back.array[:8].any()
        assert calls == ["synchronize", "flush"]
        remote = target.remote()
        target.close()
        with pytest.raises(RemoteAccessError):
            channel.write(source.view(), remote.view()).wait(SECONDS)
        source.close()
        with pytest.raises(RegionClosed):
            channel.write(source.view(), remote.view())
