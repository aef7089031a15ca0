"""Builds the allocator of ``allocator.cpp``, once per version of torch, and installs it in torch."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tensorwire.builds import build
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.progress import progress

SWITCH = "TENSORWIRE_BIRTH"
MOST_OUTPUTS = 8  # of one operator, in one call
ONLY_RECORD = 2**32 - 1  # a skip that no allocation reaches

_SOURCE = Path(__file__).with_name("allocator.cpp")


@dataclass(frozen=True)
class Allocator:
    """The functions of ``allocator.cpp``, where they are described. ``begin`` takes packed bytes."""

    begin: Callable[[int, bytes, bytes], int]
    end: Callable[[], int]
    which: Callable[[int, int], int]
    taken: Callable[[int], int]
    lock: Callable[[int, bytes], None]


def allocator() -> Allocator | None:
    """The allocator, built and installed when this is first called; None where that cannot be.

    Raises `ArgumentError` for another value of ``TENSORWIRE_BIRTH`` than ``on`` and ``off``.
    """
    found = _found()
    return found if isinstance(found, Allocator) else None


def why_not() -> str | None:
    """Why there is no allocator, in one line; None if there is one."""
    found = _found()
    return found if isinstance(found, str) else None


@functools.cache
def _found() -> Allocator | str:
    return _find()


def _find() -> Allocator | str:
    """Looks for it anew: the allocator, or why there is none."""
    if (switch := os.environ.get(SWITCH, "on")) not in ("on", "off"):
        raise ArgumentError(f"{SWITCH} must be on or off, not {switch!r}")
    if switch == "off":
        return f"{SWITCH}=off"
    try:
        library = _load()
    except Unsupported as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or _SOURCE.name}: {error.strerror or error}"
    if library.install() != 0:
        return f"torch {torch.__version__} does not take another allocator"
    library.which.argtypes, library.which.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int64
    library.taken.argtypes = (ctypes.c_void_p,)
    library.lock.argtypes, library.lock.restype = (ctypes.c_void_p, ctypes.c_char_p), None
    # begin and end have no argtypes: ints and bytes go over faster without.
    return Allocator(library.begin, library.end, library.which, library.taken, library.lock)


def _words() -> list[str]:
    # torch.utils.cpp_extension knows these too, but needs setuptools, which is not everywhere.
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    return [
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", abi),
        *(f"-I{root / 'include'}", str(_SOURCE), f"-L{root / 'lib'}", "-lc10"),
    ]


def _load() -> ctypes.PyDLL:
    """Loads the build, which is made anew if it cannot be loaded. Python is not of what it depends on."""
    version = torch.__version__
    announced = partial(progress, f"building {_SOURCE.name} once for torch {version}")
    for _ in range(2):
        path = build("birth", _SOURCE, _words(), announced, facts=(version, str(torch.version.git_version)))
        try:
            return ctypes.PyDLL(str(path))
        except OSError as error:
            path.unlink(missing_ok=True)
            why = str(error)
    raise Unsupported(f"cannot be loaded: {why}")
