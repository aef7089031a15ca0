"""Memory of other libraries as regions, and regions as their arrays: DLPack and the buffer protocol."""

from __future__ import annotations

import array
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.memoryless import WITHOUT_MEMORY

from tensorwire.device import Device, LoopbackDevice, ShmDevice, TcpDevice
from tensorwire.errors import ArgumentError
from tensorwire.testing.patience import patient

KINDS = {"loopback": LoopbackDevice, "shm": ShmDevice, "tcp": TcpDevice}
SECONDS = patient(60.0)
TORCH = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "bool", "complex64", "uint16", "float32", "int64"]


@pytest.fixture(params=list(KINDS))
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with KINDS[request.param]() as made:
        yield made


def sent(device: Device, owner: Any) -> bytes:
    """What a peer has after a write whose source is ``owner``, registered."""
    with device.register(owner) as region, KINDS[device.name]() as peer, device.connect(peer.address) as channel:
        target = peer.allocate(region.nbytes)
        channel.write(region.view(), target.remote().view()).wait(SECONDS)
        return bytes(memoryview(target))


@pytest.mark.parametrize("dtype", TORCH)
def test_tensors_of_torch_are_sources_and_destinations(device: Device, dtype: str) -> None:
    tensor = (torch.arange(48, dtype=torch.uint8) % 2).view(getattr(torch, dtype)).view(2, 3, -1)
    content = tensor.view(torch.uint8).numpy().tobytes()
    assert sent(device, tensor) == content
    region = device.register(tensor)
    assert (region.nbytes, region.address, region.writable) == (48, tensor.data_ptr(), True)
    memoryview(region)[:] = bytes(48)
    assert not tensor.view(torch.uint8).any()


@pytest.mark.parametrize("empty", [torch.zeros(0), torch.zeros(3, 0).T, np.zeros((0, 2)), b"", bytearray()])
def test_empty_memory(device: Device, empty: Any) -> None:
    assert sent(device, empty) == b""


def test_other_contiguous_memory(device: Device) -> None:
    for owner in (array.array("d", [1.5, 2.5]), np.float32(3), np.arange(6).reshape(2, 3), memoryview(b"abc"), b"x"):
        assert sent(device, owner) == bytes(memoryview(owner).cast("B"))
    assert sent(device, torch.arange(6.0).reshape(2, 3)[1:]) == np.array([3, 4, 5], np.float32).tobytes()
    assert sent(device, torch.zeros((), dtype=torch.bool)) == b"\0"


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "transposed": (lambda: torch.zeros(2, 3).T, "not contiguous: make a contiguous copy"),
    "expanded": (lambda: torch.zeros(1, 3).expand(2, 3), "not contiguous"),
    "strided": (lambda: np.zeros(6)[::2], "such as a copy of it"),
    "reversed": (lambda: np.zeros(6)[::-1], "contiguous"),
    "another device": (lambda: torch.zeros(3, device="meta"), "meta"),
    "wants a gradient": (lambda: torch.zeros(3, requires_grad=True), r"detach\(\)"),
    "negative": (lambda: torch.zeros(1, dtype=torch.complex64).conj().imag, r"resolve_neg\(\)"),
    "conjugate": (lambda: torch.zeros(3, dtype=torch.complex64).conj(), "conjugate"),
    "sparse": (lambda: torch.zeros(3).to_sparse(), "strided"),
    "python objects": (lambda: np.zeros(3, object), "Python objects"),
    "a list": (lambda: [1, 2], "buffer protocol or DLPack"),
    "nothing": (lambda: None, "got None"),
    **{f"without memory: {name}": (make, "memory|strided|FunctionalTensor") for name, make in WITHOUT_MEMORY.items()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_registered(name: str) -> None:
    make, why = REFUSED[name]
    with LoopbackDevice() as device, pytest.raises(ArgumentError, match=why):
        device.register(make())


class Elsewhere:
    """A tensor in a GPU's memory, as DLPack shows it."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: object) -> object:
        raise AssertionError("asked for memory that cannot be reached")


def test_memory_that_is_not_the_cpus_is_refused() -> None:
    with LoopbackDevice() as device, pytest.raises(ArgumentError, match=r"not in the CPU's memory.*\.cpu\(\)"):
        device.register(Elsewhere())


class ReadOnly:
    """Memory that only the newer form of DLPack can show: it says that nobody may write."""

    def __init__(self) -> None:
        self.array = np.frombuffer(b"constant", np.uint8)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


def test_read_only_memory_stays_so(device: Device) -> None:
    for owner in (b"constant", ReadOnly()):
        region = device.register(owner)
        assert not region.writable
        assert bytes(memoryview(region)) == b"constant"
        with pytest.raises(ArgumentError, match="read-only"):
            region.remote("write")
        with pytest.raises(ArgumentError, match="read-only"):  # torch would write there
            torch.from_dlpack(region)
        assert bytes(np.from_dlpack(region, copy=True)) == b"constant"
        assert sent(device, owner) == b"constant"


def test_a_region_keeps_the_tensor_and_lets_it_go(device: Device) -> None:
    tensor = torch.arange(1000)
    storage = weakref.ref(tensor.untyped_storage())
    held = device.register(tensor)
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    assert held.address == address
    assert np.frombuffer(held, np.int64).sum() == 499_500
    del held
    gc.collect()
    assert storage() is None

    owner = np.arange(1000)
    alive = weakref.ref(owner)
    region = device.register(owner)
    del owner
    assert alive() is not None
    del region
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("load", [torch.from_dlpack, np.from_dlpack])
def test_an_array_keeps_the_regions_memory(device: Device, load: Callable[[Any], Any]) -> None:
    region = device.allocate(10_000)
    memoryview(region)[:3] = b"abc"
    view = load(region)
    assert (view.dtype in (torch.uint8, np.uint8), tuple(view.shape)) == (True, (10_000,))
    address = region.address
    assert address % 4096 == 0  # TensorFlow aliases memory only at 64 bytes, and ends the process for less
    view[0] = ord("x")
    assert memoryview(region)[0] == ord("x")  # the memory itself, not a copy
    region.close()
    alive = weakref.ref(region)
    del region
    gc.collect()
    assert alive() is not None
    assert bytes(view[:3].tolist()) == b"xbc"
    view[:] = 1
    assert int(view.sum()) == 10_000
    del view
    gc.collect()
    assert alive() is None
