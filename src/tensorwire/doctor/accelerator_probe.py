"""What PyTorch says of accelerators, and whether they take a store's memory. A process of its own runs it.

So the doctor itself never imports PyTorch, and outlives whatever a driver does.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys

import msgspec


class Seen(msgspec.Struct, frozen=True):
    """Devices of one ``kind``, such as ``cuda``, by name; empty: none. ``refusal``: of `page_lock_refusal`."""

    kind: str = ""
    names: list[str] = []
    refusal: str = ""


def main() -> None:
    """Writes what it sees on standard output, for `tensorwire.doctor.accelerators`."""
    sys.stdout.buffer.write(msgspec.json.encode(look()))


def look() -> Seen:
    """What ``torch.accelerator`` sees."""
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return Seen()
    name = getattr(torch.get_device_module(device), "get_device_name", lambda number: device.type)
    names = [str(name(number)) for number in range(torch.accelerator.device_count())]
    return Seen(device.type, names, page_lock_refusal(device.type))


def page_lock_refusal(kind: str) -> str:
    """Why memory such as a store's cannot be page-locked for devices of that kind; empty: it can, it was tried."""
    import numpy as np

    from tensorwire.torch.page_locking import PageLocks

    nbytes, locks = mmap.PAGESIZE, PageLocks(kind)
    fd = os.memfd_create("tensorwire-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        gradients, values = mmap.mmap(fd, nbytes), mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
        for area, read_only in ((gradients, False), (values, True)):
            if not locks.lock(np.frombuffer(area, np.uint8).ctypes.data, nbytes, read_only=read_only):
                break
        locks.close()
    finally:
        os.close(fd)
    return locks.refusal


if __name__ == "__main__":
    main()
