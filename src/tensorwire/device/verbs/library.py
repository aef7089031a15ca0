"""Access to libibverbs: loaded on demand; each obstacle becomes an error with its remedy."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from tensorwire.errors import VerbsUnavailable
from tensorwire.extras import how_to_install

DEVICES = Path("/sys/class/infiniband")
_CHARACTER_DEVICES = Path("/dev/infiniband")
_NOT_LOADED = "the kernel offers no verbs to programs: load its module (modprobe ib_uverbs)"


def load() -> Any:
    """The module ``ibverbs``. Raises `VerbsUnavailable` without it, or without libibverbs."""
    try:
        import ibverbs
    except ModuleNotFoundError:
        raise VerbsUnavailable(f"the Python package ibverbs is missing: {how_to_install('verbs')}") from None
    except ImportError as error:
        raise VerbsUnavailable(
            f"libibverbs cannot be loaded ({error}): install libibverbs1 and ibverbs-providers (Debian, Ubuntu) "
            "or libibverbs (Fedora, Red Hat)"
        ) from None
    return ibverbs


def open_device(name: str, root: Path = DEVICES) -> Any:
    """The context of the RDMA device ``name``, such as ``mlx5_0``; close it. Raises `VerbsUnavailable`.

    ``root``: where the kernel lists its RDMA devices.
    """
    ibverbs = load()
    try:
        devices = {device.name: device for device in ibverbs.get_device_list()}
    except OSError as error:
        if error.errno == errno.ENOSYS:  # what libibverbs says where the kernel's half is missing
            raise VerbsUnavailable(_NOT_LOADED) from None
        raise VerbsUnavailable(f"cannot list RDMA devices: {error}") from None
    if name not in devices:
        driver = f"libibverbs has no driver for {name}: install ibverbs-providers (Debian, Ubuntu) or rdma-core"
        raise VerbsUnavailable(_obstacle(name, root) or driver)
    try:
        return devices[name].open()
    except OSError as error:
        raise VerbsUnavailable(_obstacle(name, root) or f"{name} cannot be opened: {error}") from None


def _node(name: str, root: Path = DEVICES) -> str | None:
    """The character device by which programs reach the RDMA device ``name``: ``uverbs0``; None if there is none."""
    for entry in sorted(root.with_name("infiniband_verbs").glob("uverbs*")):
        try:
            if (entry / "ibdev").read_text().strip() == name:
                return entry.name
        except OSError:  # removed meanwhile
            continue
    return None


def _obstacle(name: str, root: Path) -> str | None:
    """What is wrong with a device, if that can be seen; libibverbs leaves it out, or answers ENOENT to everything."""
    if not (root / name).exists():
        return f"there is no RDMA device {name} here: tensorwire doctor lists them"
    if (found := _node(name, root)) is None:
        return f"{name}: {_NOT_LOADED}"
    path = _CHARACTER_DEVICES / found
    if not path.exists():
        return (
            f"{name}: {path} is missing: in a container, start it with --device /dev/infiniband "
            "(and --ulimit memlock=-1); else load the module (modprobe ib_uverbs)"
        )
    if not os.access(path, os.R_OK | os.W_OK):
        who = f"this user (number {os.geteuid()})"
        return f"no permission to use {name}: {who} needs to read and write {path} (often: be in the group rdma)"
    return None
