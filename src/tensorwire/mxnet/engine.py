"""Operations in MXNet's engine that start when their arrays are ready and end when Tensorwire says so.

The engine hands an operation over without keeping a thread; readers of the arrays that it writes wait for its end.
Threads that compute nothing start operations: otherwise requests would queue behind copies and layers. The layouts are
those of MXNet 1.9.1.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx

_PRIORITIZED = 3  # FnProperty::kCPUPrioritized; kAsync, 4, takes its turn among computations
_START = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_END = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_CPU = 1


class _Context(ctypes.Structure):
    _fields_ = [("dev_type", ctypes.c_int), ("dev_id", ctypes.c_int32)]


class _OnComplete(ctypes.Structure):
    """``Engine::CallbackOnComplete``."""

    _fields_ = [("callback", ctypes.c_void_p), ("engine", ctypes.c_void_p), ("param", ctypes.c_void_p)]


Ended = Callable[[BaseException | None], None]  # an error: whoever reads what the operation writes raises it
_cxx = ctypes.CDLL("libstdc++.so.6")  # what MXNet throws is a std::runtime_error, of two words
_numbers = itertools.count(1)
_begun: dict[int, Callable[[Ended], None]] = {}  # by number: operations that the engine has not started
_lock = threading.Lock()


def _start(_: int, on_complete: int, number: int) -> None:
    """In a thread of the engine."""
    end = _OnComplete.from_address(on_complete)  # on the stack of the caller
    callback, engine, param = end.callback, end.engine, end.param
    with _lock:
        begin = _begun.pop(number)
    begin(lambda error: _end(callback, engine, param, error))


def _end(callback: int, engine: int, param: int, error: BaseException | None) -> None:
    if error is None:
        _END(callback)(engine, param, None)
        return
    thrown = (ctypes.c_void_p * 2)()
    _cxx._ZNSt13runtime_errorC1EPKc(thrown, f"{type(error).__name__}: {error}".encode())
    _END(callback)(engine, param, ctypes.addressof(thrown))
    _cxx._ZNSt13runtime_errorD1Ev(thrown)


_start_function = _START(_start)
_context, _property = _Context(_CPU, 0), ctypes.c_int(_PRIORITIZED)


def push(begin: Callable[[Ended], None], reads: Sequence[Any], writes: Sequence[Any], name: str) -> None:
    """Calls ``begin(ended)`` once the arrays are there; ``begin`` returns at once, and `Ended` is called later.

    ``reads``, ``writes``: NDArrays, none of them in both.
    """
    with _lock:
        number = next(_numbers)
        _begun[number] = begin
    mx.base.check_call(
        mx.base._LIB.MXEnginePushAsyncND(
            _start_function,
            ctypes.c_void_p(number),
            None,
            ctypes.byref(_context),
            _handles(reads),
            len(reads),
            _handles(writes),
            len(writes),
            ctypes.byref(_property),
            0,
            name.encode(),
            False,
        )
    )


def forget_errors() -> None:
    """Waits until the engine is idle. What was raised is not raised once more when it stops."""
    with contextlib.suppress(Exception):
        mx.nd.waitall()


def _handles(arrays: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays))
