"""An operator whose results a Python thread provides. TensorFlow's threads do not wait, and nothing is pickled."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tensorwire.errors import OutOfMemory
from tensorwire.tensorflow.build import OperatorLibrary, load_library
from tensorwire.tensorflow.error_texts import as_text

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_LOOK = 1.0  # seconds between looks at whether the key was closed


class Values:
    """Tensors as bytes, by their numbers, and what becomes of them.

    Attributes:
        arrays: The operands. They may be read until the run is over.
        fingerprint: What the operator was given with them.
        results: What has been asked for by `result`.
    """

    def __init__(self, arrays: dict[int, Bytes], fingerprint: float = 0.0) -> None:
        self.arrays, self.fingerprint = arrays, fingerprint
        self.results: dict[int, Bytes] = {}

    def result(self, number: int) -> Bytes:
        """Memory for the result of a tensor, which without it is the operand. Raises `OutOfMemory`."""
        if number not in self.results:
            self.results[number] = self._allocate(number)
        return self.results[number]

    def _allocate(self, number: int) -> Bytes:
        return np.empty_like(self.arrays[number])

    def changed(self, number: int) -> Bytes:
        """The same, where what is not written is the operand."""
        if number not in self.results:
            np.copyto(self.result(number), self.arrays[number])
        return self.results[number]

    def now(self, number: int) -> Bytes:
        """What comes out for a tensor."""
        return self.results.get(number, self.arrays[number])


class _Run(Values):
    """Those of a run of the operator."""

    def __init__(self, run: ctypes.c_void_p, count: int) -> None:
        self._run, self._library = run, _load_exchange().library
        numbers, addresses, sizes = ((ctypes.c_uint64 * count)() for _ in range(3))
        given: float = self._library.tensorwire_exchange_inputs(run, numbers, addresses, sizes)
        self._places = {number: place for place, number in enumerate(numbers)}
        super().__init__({n: _bytes_at(a, s) for n, a, s in zip(numbers, addresses, sizes, strict=True)}, given)

    def _allocate(self, number: int) -> Bytes:
        address = self._library.tensorwire_exchange_output(self._run, self._places[number])
        if not address:
            raise OutOfMemory("TensorFlow has no memory for what comes from the servers")
        return _bytes_at(address, self.arrays[number].nbytes)


class TensorExchange:
    """The thread, and calls of the operator.

    Args:
        key: The operator's key, one in the process.
        handle: Brings the results of a run. What it raises ends the call of TensorFlow.
    """

    def __init__(self, key: str, handle: Callable[[Values], None]) -> None:
        self._key, self._handle, self._library = key, handle, _load_exchange().library
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"tensorwire {key}", daemon=True)
        self._thread.start()

    def __call__(self, fingerprint: Any, tensors: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
        """Adds the operator, or runs it at once. Each tensor has a number, and a result of its shape."""
        ops = _load_exchange().ops
        return list(ops.tensorwire_exchange(fingerprint, list(tensors), key=self._key, numbers=list(numbers)))

    def close(self) -> None:
        """No run will have results any more. Idempotent."""
        self._closed = True
        self._library.tensorwire_exchange_close(self._key.encode())
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        key, count = self._key.encode(), ctypes.c_uint64()
        while not self._closed:
            run = self._library.tensorwire_exchange_next(key, _LOOK, ctypes.byref(count))
            if run:
                self._answer(ctypes.c_void_p(run), count.value)

    def _answer(self, run: ctypes.c_void_p, count: int) -> None:
        code, text = 0, ""
        try:
            self._handle(_Run(run, count))
        except Exception as error:  # whatever it is: the call of TensorFlow must not wait for ever
            code, text = as_text(error)
        self._library.tensorwire_exchange_done(run, code, text.encode())


def fingerprint(tensors: Sequence[Any]) -> Any:
    """A float64 that most likely changes with the tensors: of each, some elements count. For use in graphs, too."""
    return _load_exchange().ops.tensorwire_fingerprint(list(tensors))


def fingerprint_of(arrays: Sequence[Bytes], itemsizes: Sequence[int]) -> float:
    """The same number of arrays of bytes, whose elements have these sizes in bytes."""
    count = len(arrays)
    kind = ctypes.c_uint64 * count
    addresses, sizes = kind(*(a.ctypes.data for a in arrays)), kind(*(a.nbytes for a in arrays))
    return float(_load_exchange().library.tensorwire_fingerprint(count, addresses, sizes, kind(*itemsizes)))


@functools.cache
def _load_exchange() -> OperatorLibrary:
    """The operators. Raises `Unsupported` where they cannot be compiled."""
    found = load_library("tensor_exchange")
    library = found.library
    at, number = ctypes.c_void_p, ctypes.c_uint64
    numbers = ctypes.POINTER(number)
    library.tensorwire_exchange_next.argtypes = [ctypes.c_char_p, ctypes.c_double, numbers]
    library.tensorwire_exchange_next.restype = at
    library.tensorwire_exchange_inputs.argtypes = [at, numbers, numbers, numbers]
    library.tensorwire_exchange_inputs.restype = ctypes.c_double
    library.tensorwire_exchange_output.argtypes = [at, number]
    library.tensorwire_exchange_output.restype = at
    library.tensorwire_exchange_done.argtypes = [at, ctypes.c_int, ctypes.c_char_p]
    library.tensorwire_exchange_done.restype = None
    library.tensorwire_fingerprint.argtypes = [number, numbers, numbers, numbers]
    library.tensorwire_fingerprint.restype = ctypes.c_double
    library.tensorwire_exchange_close.argtypes = [ctypes.c_char_p]
    library.tensorwire_exchange_close.restype = None
    for name in ("TensorwireExchange", "TensorwireFingerprint"):
        tf.no_gradient(name)
    return found


def _bytes_at(address: int, nbytes: int) -> Bytes:
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B"), np.uint8)
