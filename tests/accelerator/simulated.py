"""The simulated accelerator: builds it, loads it into this process's torch as the device "sim", and steers it.

It has two devices, "sim:0" and "sim:1". Kernels and copies compute on the CPU, with its bits, but run late: at the
latest when the host waits for them. A host access to a device's memory ends the process with SIGSEGV. So a program that
waits too little, or for the wrong thing, has wrong numbers (mostly NaN) or ends; `schedule` chooses one of the orders
that work may have.

It changes the torch of the process for good: use it in processes of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

TORCH = "2.13"  # the only versions that it is written for: those of one minor release differ little in what it needs

_SOURCES = Path(__file__).parent / "device"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-unused")
_BUILDS = Path(__file__).parents[2] / "build" / "accelerator"
_loaded: ctypes.CDLL | None = None


def unavailable() -> str | None:
    """Why it cannot be used here, in one line for a skipped test; None if it can be."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "the simulated accelerator needs PyTorch"
    version = importlib.metadata.version("torch")
    if not version.startswith(TORCH + "."):
        return f"the simulated accelerator needs PyTorch {TORCH}, not {version}"
    if not (Path(found.origin).parent / "include" / "ATen" / "ATen.h").exists():
        return "the simulated accelerator needs PyTorch's headers"
    if shutil.which("g++") is None:
        return "the simulated accelerator needs g++"
    return None


def load() -> None:
    """Makes the device "sim" in this process's torch; builds it first if it was not, or if its sources are newer.

    Raises:
        RuntimeError: It cannot be used here, or could not be built.
    """
    global _loaded
    if _loaded is not None:
        return
    if why := unavailable():
        raise RuntimeError(why)
    import torch
    from torch.utils import backend_registration

    _loaded = _declared(ctypes.CDLL(str(build())))
    backend_registration.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _device_module())  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend()
    torch.empty(1, pin_memory=True)  # until the first one, Tensor.is_pinned() is False for all memory


def schedule(seed: int) -> None:
    """Chooses the order of the device's work from now on. Until this is called, it is that of 0.

    Args:
        seed: 0: a wait of the host runs only what it waits for. 1: it runs everything else first that can run. Others:
            at random, and some already when work is issued. The same seed gives the same order, as long as one thread
            uses the device.
    """
    _library().simulated_schedule(seed)


def host_waits() -> int:
    """How often this thread has waited for the device.

    These are synchronizations of streams, events and devices; blocking copies, such as those of ``item()`` and those to
    memory that is not page-locked; and operators whose sizes depend on values, such as ``nonzero``. A wait for what is
    already done counts, too. ``query()`` is none.
    """
    return int(_library().simulated_host_waits())


def settle() -> None:
    """Runs everything that is pending on all devices.

    Raises:
        RuntimeError: A kernel failed, since a wait raised last. It is the first that did.
    """
    _raise(_library().simulated_settle())


def pending() -> int:
    """How many kernels, copies, and recordings of and waits for events have not run."""
    return int(_library().simulated_pending())


def register(address: int, nbytes: int) -> None:
    """Page-locks host memory that was not allocated as such, as ``cudaHostRegister`` does.

    Args:
        address: Where it begins.
        nbytes: Its size.

    Raises:
        RuntimeError: Some of it is already.
    """
    _raise(_library().simulated_register(address, nbytes))


def unregister(address: int) -> None:
    """Ends the page-lock of memory that was registered.

    Args:
        address: Where it begins.

    Raises:
        RuntimeError: It is not registered, or a copy that uses it is pending.
    """
    _raise(_library().simulated_unregister(address))


def registered() -> int:
    """How many registrations of memory there are."""
    return int(_library().simulated_registered())


def limit(nbytes: int | None) -> None:
    """Sets how many bytes of tensors each device can have before ``torch.OutOfMemoryError``; None: 4 GiB."""
    if nbytes is not None and nbytes < 1:
        raise ValueError(f"a limit of {nbytes} bytes")
    _library().simulated_limit(nbytes or 0)


def allocated(index: int = 0) -> int:
    """How many bytes of a device's memory tensors have now. Each tensor has a multiple of 512."""
    return int(_library().simulated_allocated(index))


def peak(index: int = 0) -> int:
    """The most that ``allocated`` was, since the start or ``torch.accelerator.reset_peak_memory_stats``."""
    return int(_library().simulated_peak(index))


def capturing(on: bool) -> None:
    """Makes ``Stream.is_capturing()`` say that a graph is captured, on all streams; nothing is captured."""
    _library().simulated_capturing(on)


# ---- build


def build() -> Path:
    """Builds the library, unless there is one that is newer than its sources. One process does; others wait for it.

    Raises:
        RuntimeError: The compiler failed; with its words.
    """
    folder = _BUILDS / f"torch-{importlib.metadata.version('torch')}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = folder / "simulated.so"
        headers = max(path.stat().st_mtime for path in _SOURCES.glob("*.h"))
        objects = []
        for source in sorted(_SOURCES.glob("*.cpp")):
            made = folder / f"{source.stem}.o"
            if not _is_newer(made, max(headers, source.stat().st_mtime)):
                _run_compiler(made, *_FLAGS, *_includes(), "-c", str(source))
            objects.append(made)
        if not _is_newer(library, max(made.stat().st_mtime for made in objects)):
            libraries = (f"-L{_torch_folder() / 'lib'}", "-ltorch_cpu", "-lc10")
            _run_compiler(library, "-shared", *map(str, objects), *libraries)
    return library


def _is_newer(made: Path, than: float) -> bool:
    return made.exists() and made.stat().st_mtime >= than


@functools.cache
def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def _includes() -> list[str]:
    root = _torch_folder() / "include"  # as a system's, whose warnings nobody wants
    return ["-isystem", str(root), "-isystem", str(root / "torch" / "csrc" / "api" / "include")]


def _run_compiler(made: Path, *words: str) -> None:
    """``made`` is there when it is whole, or not at all. It is as old as the start: sources may change meanwhile."""
    fresh, began = made.with_suffix(f".{os.getpid()}{made.suffix}"), time.time()
    try:
        done = subprocess.run(["g++", *words, "-o", str(fresh)], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"g++ could not make {made.name}:\n{done.stderr[:4000]}")
        os.utime(fresh, (began, began))
        fresh.replace(made)
    finally:
        fresh.unlink(missing_ok=True)


# ---- the library and torch's module of the device


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments, result in (
        ("schedule", (ctypes.c_uint64,), None),
        ("host_waits", (), ctypes.c_int64),
        ("settle", (), ctypes.c_char_p),
        ("pending", (), ctypes.c_int64),
        ("register", (ctypes.c_size_t, ctypes.c_size_t), ctypes.c_char_p),
        ("unregister", (ctypes.c_size_t,), ctypes.c_char_p),
        ("registered", (), ctypes.c_int64),
        ("limit", (ctypes.c_size_t,), None),
        ("allocated", (ctypes.c_int,), ctypes.c_int64),
        ("peak", (ctypes.c_int,), ctypes.c_int64),
        ("capturing", (ctypes.c_int,), None),
        ("forked", (), ctypes.c_int),
    ):
        function = getattr(library, f"simulated_{name}")
        function.argtypes, function.restype = arguments, result
    return library


def _library() -> ctypes.CDLL:
    if _loaded is None:
        raise RuntimeError("the simulated accelerator is not loaded: call load() first")
    return _loaded


def _raise(message: bytes | None) -> None:
    if message is not None:
        raise RuntimeError(message.decode())


def _device_module() -> types.ModuleType:
    """What is ``torch.sim``: what torch itself asks of a device's module."""
    import torch

    module = types.ModuleType("torch.sim")

    def index_of(device: Any = None) -> int:
        if device is None:
            return torch.accelerator.current_device_index()
        if isinstance(device, int):
            return device
        index: int | None = torch.device(device).index
        return torch.accelerator.current_device_index() if index is None else index

    def device(device: Any) -> contextlib.AbstractContextManager[object]:
        return torch.accelerator.device_index(index_of(device))

    # Random numbers are those of the CPU: torch.manual_seed sets both at once.
    functions: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: bool(_library().simulated_forked()),
        "device": device,
        "device_count": lambda: 2,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(index_of(device)),
        "synchronize": lambda device=None: torch.accelerator.synchronize(index_of(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(index_of(device)),
        "set_stream": torch.accelerator.set_stream,
        "Stream": lambda device=None: torch.Stream(device=f"sim:{index_of(device)}"),
        "Event": lambda: torch.Event(device="sim"),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: allocated(index_of(device)),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


if __name__ == "__main__" and unavailable() is None:
    build()
