"""Which way a CUDA tensor becomes a region, what is done before and after transfers, and what is refused."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tensorwire.device.verbs import cuda
from tensorwire.device.verbs.cuda import CudaRegion, DirectRegion, StagedRegion
from tensorwire.errors import ArgumentError, OutOfMemory, RegionClosed, Unsupported

AT, NBYTES = 0x7F00_0000_1000, 4096


class Registration:
    """What ibverbs.cuda gives for a tensor."""

    def __init__(self, tensor: Tensor, access: int, number: int) -> None:
        self.tensor, self.access = tensor, access
        self.lkey, self.rkey = number, number + 1000
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Library(ModuleType):
    """The module ibverbs.cuda. ``direct``: whether GPUs and NIC know each other."""

    def __init__(self) -> None:
        super().__init__("ibverbs.cuda")
        self.direct = True
        self.made: list[Registration] = []
        self.calls: list[str] = []

    def register_tensor(self, domain: object, tensor: Tensor, access: int) -> Registration:
        assert domain == "domain"
        if not self.direct:
            raise RuntimeError("GPUDirect registration failed. dma-buf path: no; reg_mr (nvidia_peermem) path: no")
        self.made.append(Registration(tensor, access, len(self.made) + 1))
        return self.made[-1]

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def flush_gpudirect_writes(self) -> None:
        self.calls.append("flush")


class Tensor:
    """A CUDA tensor of bytes, or its pinned copy."""

    is_cuda = True
    device = "cuda:3"

    def __init__(self, content: bytes = bytes(NBYTES), *, contiguous: bool = True) -> None:
        self.content = content
        self.is_contiguous = lambda: contiguous
        self.element_size = lambda: 1
        self.numel = lambda: len(content)
        self.data_ptr = lambda: AT

    def copy_(self, other: Tensor) -> None:
        self.content = other.content


@pytest.fixture
def library(ibverbs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "ibverbs.cuda", made)
    return made


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch, library: Library) -> SimpleNamespace:
    """As much of it as the program would have loaded; it knows which GPU is the current one."""

    @contextlib.contextmanager
    def device(name: str) -> Iterator[None]:
        library.calls.append(f"on {name}")
        yield

    def empty_like(tensor: Tensor, *, device: str, pin_memory: bool) -> Tensor:
        assert (device, pin_memory) == ("cpu", True)
        return Tensor(bytes(len(tensor.content)))

    made = SimpleNamespace(cuda=SimpleNamespace(device=device), empty_like=empty_like)
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


class Host:
    """The region of a pinned copy."""

    closed = False

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def view(self, *arguments: object) -> tuple[object, ...]:
        return ("view", *arguments)

    def remote(self, access: str) -> tuple[str, str]:
        return ("remote", access)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def device() -> Any:
    """As much of a verbs device as regions need."""
    liveness = SimpleNamespace(lost=False, forked=False)
    return SimpleNamespace(_nic=SimpleNamespace(domain="domain"), liveness=liveness, register=Host)


def test_the_gpus_own_memory_where_the_nic_reaches_it(library: Library, device: Any) -> None:
    tensor = Tensor()
    region = cuda.register(device, tensor)
    assert isinstance(region, DirectRegion)
    assert (region.path, region.address, region.nbytes, len(region), region.lkey) == (
        "gpudirect",
        AT,
        NBYTES,
        NBYTES,
        1,
    )
    assert (region.device, region.closed, region.writable) == (device, False, True)
    view = region.view(64)
    assert (view.region, view.offset, view.nbytes) == (region, 64, NBYTES - 64)
    with pytest.raises(ArgumentError, match="outside"):
        region.view(64, NBYTES)
    assert [made.access for made in library.made] == [1]  # local only, until it is shown


def test_peers_get_a_registration_of_their_own(library: Library, device: Any) -> None:
    region = cuda.register(device, Tensor())
    remote = region.remote()
    assert (remote.device, remote.key, remote.length, remote.access) == ("verbs", 1002, NBYTES, "write")
    assert remote.address == AT
    assert region.remote() == remote
    assert region.remote("read").key == 1003
    assert [made.access for made in library.made] == [1, 15, 4]
    with pytest.raises(ArgumentError, match="'read' or 'write'"):
        region.remote("all")  # type: ignore[arg-type]
    region.close()
    region.close()
    assert [made.closed for made in library.made] == [False, True, True]  # what is on its way needs the first
    with pytest.raises(RegionClosed):
        region.remote()
    del region
    gc.collect()
    assert library.made[0].closed


def test_a_closed_device_needs_its_registrations_back(library: Library, device: Any) -> None:
    region = cuda.register(device, Tensor())
    region.remote("read")
    device.liveness.lost = True
    region.close()
    assert all(made.closed for made in library.made)


def test_cuda_is_informed_before_a_write_and_before_use(library: Library, device: Any) -> None:
    region = cuda.register(device, Tensor())
    library.calls.clear()
    region.stage()
    region.flush()
    assert library.calls == ["on cuda:3", "synchronize", "on cuda:3", "flush"]


def test_without_gpudirect_it_goes_through_a_pinned_copy(library: Library, device: Any) -> None:
    library.direct = False
    tensor = Tensor(b"computed")
    region = cuda.register(device, tensor)
    assert isinstance(region, StagedRegion)
    assert (region.path, region.nbytes) == ("staged", 8)
    assert "nvidia_peermem" in region.why
    assert region.view(0, 4) == ("view", 0, 4)  # of the copy: channels see nothing of the GPU
    assert region.remote("read") == ("remote", "read")
    region.stage()
    assert region._copy.content == b"computed"
    region._copy.content = b"arrived!"
    region.flush()
    assert tensor.content == b"arrived!"
    region.close()
    assert region.closed


def test_pinned_memory_that_cannot_be_had(library: Library, device: Any, torch: SimpleNamespace) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    library.direct, torch.empty_like = False, refuse
    with pytest.raises(OutOfMemory, match="no pinned host memory of 4096 bytes"):
        cuda.register(device, Tensor())


@pytest.mark.parametrize("direct", [True, False])
def test_signals_are_waited_for_in_host_memory(library: Library, device: Any, direct: bool) -> None:
    library.direct = direct
    with cuda.register(device, Tensor()) as region, pytest.raises(Unsupported, match="host memory"):
        region.wait(0, 1, 10.0)
    assert region.closed


@pytest.mark.parametrize("tensor", [Tensor(b""), Tensor(contiguous=False)])
def test_tensors_that_cannot_be_regions(device: Any, tensor: Tensor) -> None:
    with pytest.raises(ArgumentError, match="contiguous tensor with elements"):
        cuda.register(device, tensor)


def test_tensors_without_memory_cannot_be_regions(device: Any) -> None:
    freed = Tensor()
    freed.data_ptr = lambda: 0
    with pytest.raises(ArgumentError, match="a tensor with memory"):
        cuda.register(device, freed)


def test_a_forked_child_ends_nothing(library: Library, device: Any) -> None:
    region = cuda.register(device, Tensor())
    region.remote()
    device.liveness.forked = True
    region.close()
    cuda._end(library.made[0], pid=1)
    assert not any(made.closed for made in library.made)


def test_a_cuda_region_is_abstract() -> None:
    with pytest.raises(TypeError):
        CudaRegion(None, None, "")  # type: ignore[abstract, arg-type]
