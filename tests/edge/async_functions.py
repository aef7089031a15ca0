"""The functions of edges that need no Python, called as a program in C++ calls them."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from tensorwire._native import HEADER, async_edges
from tensorwire.testing.patience import patient

_u64, _u8, _pointer = ctypes.c_uint64, ctypes.c_uint8, ctypes.c_void_p
CALL = ctypes.CFUNCTYPE(None, _pointer, ctypes.c_int)
DONE, TIMED_OUT, LOST, REFUSED = range(4)
TENSOR, UINT8 = 1, 1


class Header(ctypes.Structure):
    """``struct tw_header``."""

    _fields_ = [
        ("magic", ctypes.c_char * 4),
        *((name, _u8) for name in ("version", "kind", "dtype", "rank")),
        *((name, _u64) for name in ("step", "nbytes", "offset", "value")),
        ("region", _u8 * 32),
        ("lengths", _u64 * 8),
        ("strides", _u64 * 8),
        ("unused", _u8 * 56),
    ]


ALLOCATE = ctypes.CFUNCTYPE(_pointer, _pointer, ctypes.POINTER(Header), _pointer, _u64)


class Functions(ctypes.Structure):
    """``struct tw_async_edges``."""

    _fields_ = [
        ("version", _u64),
        ("send", ctypes.CFUNCTYPE(None, _pointer, ctypes.POINTER(Header), _pointer, CALL, _pointer)),
        ("take", ctypes.CFUNCTYPE(None, _pointer, ALLOCATE, CALL, _pointer)),
        ("arrives", ctypes.CFUNCTYPE(ctypes.c_int, _pointer, ctypes.c_double)),
        ("release", ctypes.CFUNCTYPE(None, _pointer, _u64)),
        ("reason", ctypes.CFUNCTYPE(None, _pointer, ctypes.c_char_p, _u64)),
    ]


functions = Functions.from_address(async_edges())
assert functions.version == 3
assert ctypes.sizeof(Header) == HEADER


class Outcome:
    """Of one call."""

    def __init__(self) -> None:
        self.value: int | None = None
        self._there = threading.Event()
        self.call = CALL(self._take)

    def _take(self, _: Any, outcome: int) -> None:
        self.value = outcome
        self._there.set()

    def wait(self) -> int | None:
        assert self._there.wait(patient(30.0))
        return self.value


def header_of(number: int, size: int, **fields: Any) -> Header:
    """Of so many bytes, in the step of that number; ``fields``: what is otherwise."""
    plain = {"kind": TENSOR, "dtype": UINT8, "rank": 1, "step": number, "nbytes": size, "lengths": (size,)}
    return Header(**{**plain, **fields})
