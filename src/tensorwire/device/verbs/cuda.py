"""Regions of CUDA tensors. The data path has not yet run on hardware.

With GPUDirect the NIC reads and writes the GPU's memory itself; without it, a pinned copy in host memory is the region.
In both cases only the program knows when CUDA is done with a tensor. It must call ``stage()`` before a write of the
tensor, and ``flush()`` before CUDA uses arrived data. Signal words stay in host memory.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from tensorwire.device.checks import check_plain
from tensorwire.device.region import Access, RemoteRegion, View, check_range
from tensorwire.device.verbs.registrations import local_access, remote_access
from tensorwire.errors import ArgumentError, OutOfMemory, RegionClosed, Unsupported
from tensorwire.observe import counters

if TYPE_CHECKING:
    from tensorwire.device.verbs.device import VerbsDevice


@dataclass(frozen=True)
class CudaView:
    """Bytes of a region of GPU memory, for a channel's write and read."""

    region: DirectRegion
    offset: int
    nbytes: int


class CudaRegion(ABC):
    """What peers reach of a CUDA ``tensor``. ``path`` is ``gpudirect`` or ``staged``, and ``why`` says why.

    It keeps the tensor. Made by ``VerbsDevice.register``.
    """

    path: str
    writable = True

    def __init__(self, device: VerbsDevice, tensor: Any, why: str) -> None:
        self.device = device
        self.tensor = tensor
        self.why = why
        self.nbytes = int(tensor.numel()) * int(tensor.element_size())

    @abstractmethod
    def view(self, offset: int = 0, nbytes: int | None = None) -> Any:
        """Bytes ``offset`` to ``offset + nbytes`` (to the end by default)."""

    @abstractmethod
    def remote(self, access: Access = "write") -> RemoteRegion:
        """A capability for a peer. Raises `RegionClosed`."""

    @abstractmethod
    def stage(self) -> None:
        """Call it after the tensor's values were computed, before a write from here: it waits for CUDA."""

    @abstractmethod
    def flush(self) -> None:
        """Call it after a peer's signal or a read into here, before CUDA uses the tensor."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether ``close()`` was called."""

    @abstractmethod
    def close(self) -> None:
        """Ends every capability for this region. Idempotent."""

    def wait(self, *_: object, **__: object) -> NoReturn:
        """Raises `Unsupported`."""
        raise Unsupported("signal words stay in host memory: allocate() a region for them, and wait there")

    def __len__(self) -> int:
        return self.nbytes

    def __enter__(self) -> CudaRegion:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DirectRegion(CudaRegion):
    """The GPU's own memory, registered with the NIC by dma-buf or by the kernel module nvidia_peermem."""

    path = "gpudirect"

    def __init__(self, device: VerbsDevice, tensor: Any) -> None:
        super().__init__(device, tensor, "the NIC reaches the GPU's memory")
        self.address = self.start = int(tensor.data_ptr())
        self.keys: dict[str, int] = {}
        self._shown: list[Any] = []
        self._closed = False
        mr = self._register(local_access())
        self.lkey: int = mr.lkey
        # What is on its way holds the region, and so what the NIC needs of it, also after close().
        self._end_local = weakref.finalize(self, _end, mr, os.getpid())
        self._end_local.atexit = False

    def _register(self, access: int) -> Any:
        with _current(self.tensor):
            mr = _library().register_tensor(self.device._nic.domain, self.tensor, access)
        counters.add(registrations=1)
        return mr

    def view(self, offset: int = 0, nbytes: int | None = None) -> CudaView:
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        check_range("region", offset, nbytes, self.nbytes)
        return CudaView(self, offset, nbytes)

    def remote(self, access: Access = "write") -> RemoteRegion:
        if self._closed:
            raise RegionClosed("this region was closed: register the tensor again")
        if access not in ("read", "write"):
            raise ArgumentError(f"access must be 'read' or 'write', not {access!r}")
        if access not in self.keys:
            self._shown.append(self._register(remote_access(access)))
            self.keys[access] = self._shown[-1].rkey
        return RemoteRegion("verbs", self.keys[access], self.nbytes, access, self.address)

    def stage(self) -> None:
        with _current(self.tensor):
            _library().synchronize()

    def flush(self) -> None:
        with _current(self.tensor):
            _library().flush_gpudirect_writes()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        if self.device.liveness.forked:
            return
        self._closed = True
        while self._shown:
            self._shown.pop().close()
        if self.device.liveness.lost:  # its queue pairs are gone, and its protection domain is next
            self._end_local()


class StagedRegion(CudaRegion):
    """A pinned copy in host memory, which ``stage`` fills and ``flush`` copies back."""

    path = "staged"

    def __init__(self, device: VerbsDevice, tensor: Any, why: str) -> None:
        super().__init__(device, tensor, why)
        torch = sys.modules["torch"]
        try:
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise OutOfMemory(f"no pinned host memory of {self.nbytes} bytes to stage a tensor: {error}") from None
        self._host = device.register(self._copy)

    def view(self, offset: int = 0, nbytes: int | None = None) -> View:
        return self._host.view(offset, nbytes)

    def remote(self, access: Access = "write") -> RemoteRegion:
        return self._host.remote(access)

    def stage(self) -> None:
        self._copy.copy_(self.tensor)  # waits for the current stream of the tensor's GPU

    def flush(self) -> None:
        self.tensor.copy_(self._copy)

    @property
    def closed(self) -> bool:
        return self._host.closed

    def close(self) -> None:
        self._host.close()


def register(device: VerbsDevice, tensor: Any) -> CudaRegion:
    """A region of a CUDA tensor: by GPUDirect where the NIC can, else staged.

    Raises `ArgumentError` for tensors that are empty or not contiguous, `OutOfMemory`.
    """
    check_plain("register", tensor)
    if not tensor.is_contiguous() or not tensor.numel():
        raise ArgumentError("register needs a contiguous tensor with elements in it, such as a copy of it")
    if not _address(tensor):
        raise ArgumentError("register needs a tensor with memory, not a fake one or one whose storage was freed")
    try:
        return DirectRegion(device, tensor)
    except (RuntimeError, OSError) as error:  # the library's words: neither dma-buf nor peermem
        return StagedRegion(device, tensor, str(error))


def _address(tensor: Any) -> int:
    """Where it lies; 0 for what wraps or stands for a tensor."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0


def _end(mr: Any, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the parent's descriptors of the NIC
        mr.close()


def _library() -> Any:
    return importlib.import_module("ibverbs.cuda")


@contextlib.contextmanager
def _current(tensor: Any) -> Iterator[None]:
    """CUDA's calls are about the current GPU of a thread."""
    torch = sys.modules.get("torch")
    with contextlib.nullcontext() if torch is None else torch.cuda.device(tensor.device):
        yield
