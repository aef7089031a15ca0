"""Page-locked memory: host memory that accelerators copy from and to by themselves, at full speed.

PyTorch can allocate such memory, but has no portable call for memory that exists already, such as what servers map. So
each vendor's call is an entry of one table, and nothing else here knows vendors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tensorwire.errors import OutOfMemory

_PORTABLE, _READ_ONLY = 1, 8  # flags of cudaHostRegister


@dataclass(frozen=True)
class Driver:
    """A vendor's two calls. ``lock(address, nbytes, read_only)`` and ``unlock(address)`` raise `RuntimeError`."""

    lock: Callable[[int, int, bool], None]
    unlock: Callable[[int], None]


def _cuda() -> Driver:
    """CUDA, and ROCm, whose PyTorch has the same names."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def lock(address: int, nbytes: int, read_only: bool) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        try:
            torch.cuda.check_error(
                int(runtime.cudaHostRegister(address, nbytes, _PORTABLE | (_READ_ONLY if read_only else 0)))
            )
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # the next kernel would report the error: let it be this one
                torch.zeros(1, device="cuda")
            raise

    def unlock(address: int) -> None:
        torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))

    return Driver(lock, unlock)


DRIVERS: dict[str, Callable[[], Driver]] = {"cuda": _cuda}  # by the type of device


class PageLocks:
    """Memory that was page-locked for devices of one ``kind``, such as ``cuda``.

    Attributes:
        refusal: Why the driver does not take the memory; empty: it has taken all of it.
    """

    def __init__(self, kind: str) -> None:
        self._kind, self._driver = kind, DRIVERS[kind]() if kind in DRIVERS else None
        self.refusal = "" if self._driver else f"PyTorch has no call that page-locks existing memory for {kind}"
        self._locked: list[int] = []

    def lock(self, address: int, nbytes: int, *, read_only: bool = False) -> bool:
        """Page-locks memory. Returns False where that is impossible; ``refusal`` then says why."""
        if self._driver is None:
            return False
        try:
            self._driver.lock(address, nbytes, read_only)
        except RuntimeError as error:
            self.refusal = f"the driver of {self._kind} refused: {str(error).splitlines()[0]}"
            return False
        self._locked.append(address)
        return True

    def close(self) -> None:
        """Unlocks everything. Nothing may be copied from or to it any more. Idempotent."""
        try:
            while self._locked:
                assert self._driver is not None
                self._driver.unlock(self._locked.pop())
        finally:
            if self._locked:  # the first error is raised, and the rest is unlocked all the same
                self.close()


def page_locked(nbytes: int) -> torch.Tensor:
    """New page-locked memory, as a tensor of bytes. Raises `OutOfMemory`."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise OutOfMemory(f"no {nbytes} bytes of page-locked memory: {str(error).splitlines()[0]}") from None
