"""A received tensor: its memory, for as long as it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorwire._native import Hold, shaped
from tensorwire.edge.tensor import DTYPES, Spec
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.observe import counters

if TYPE_CHECKING:
    import numpy

# DLDataTypeCode of dlpack.h, by how a dtype's name begins: the longest comes first.
_CODES = {
    "float8_e4m3fnuz": 11,
    "float8_e4m3fn": 10,
    "float8_e5m2fnuz": 13,
    "float8_e5m2": 12,
    "float8_e8m0fnu": 14,
    "bfloat": 4,
    "complex": 5,
    "bool": 6,
    "float": 2,
    "uint": 1,
    "int": 0,
}


class Received:
    """A tensor that arrived: ``memory`` holds the elements of ``spec``.

    The memory is its own until ``release()``, or until this object and everything that looks into the memory are gone:
    arrays and tensors made of it keep it. Usable as a context manager that releases it. ``numpy()`` and DLPack
    (``torch.from_dlpack(received)``) show it with its shape and dtype, without a copy.
    """

    __slots__ = ("_hold", "spec")

    def __init__(self, hold: Hold, spec: Spec) -> None:
        self._hold = hold
        self.spec = spec

    @property
    def memory(self) -> memoryview:
        """Its bytes. Raises `ArgumentError` after ``release()``."""
        if self._hold.released:
            raise ArgumentError("this tensor was released: keep it until it has been used")
        return memoryview(self._hold)

    def numpy(self) -> numpy.ndarray[Any, Any]:
        """Views the tensor as an array of numpy.

        Returns:
            An array in this memory, which it keeps; read-only where the memory is.

        Raises:
            ArgumentError: After ``release()``.
            Unsupported: For ``bfloat16`` and ``float8``, which numpy has only with the package ``ml_dtypes``.
        """
        import numpy

        spec, strides = self.spec, None
        if spec.strides is not None:
            strides = [stride * DTYPES[spec.dtype] for stride in spec.strides]
        array: numpy.ndarray[Any, Any] = numpy.ndarray(spec.shape, _numpy_dtype(spec), self.memory, strides=strides)
        return array

    def __dlpack__(self, **options: Any) -> Any:
        """The tensor in this memory, which its consumer keeps; with ``copy=True`` a copy of it.

        Raises:
            ArgumentError: After ``release()``, and for read-only memory without ``copy=True``: consumers would write.
            Unsupported: For a tensor that does not lie contiguous: ``numpy()`` shows it.
        """
        memory: Any = self.memory
        if self.spec.strides is not None:
            raise Unsupported(f"DLPack shows contiguous tensors; {self.spec} is shown by numpy()")
        if options.get("copy"):
            memory = bytearray(memory)
            counters.add(copies=1, copied_bytes=self.spec.nbytes)
        elif memory.readonly:
            raise ArgumentError(
                "this memory is the producer's, and read-only here: torch.from_dlpack(received, copy=True) copies it; "
                "or look at it by numpy(), or let the producer say access='write' when it connects"
            )
        options.pop("copy", None)
        dtype = self.spec.dtype
        code = next(code for start, code in _CODES.items() if dtype.startswith(start))
        tensor: Any = shaped(memory, self.spec.shape, code, 8 * DTYPES[dtype])
        return tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU

    def release(self) -> None:
        """Gives the memory back at once: what still looks into it sees what comes there next. Idempotent."""
        self._hold.release()

    def __enter__(self) -> Received:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<received {self.spec}{', released' if self._hold.released else ''}>"


def _numpy_dtype(spec: Spec) -> Any:
    import numpy

    try:
        return numpy.dtype(spec.dtype)
    except TypeError:  # one of the short floats, unless somebody loaded ml_dtypes
        pass
    try:
        import ml_dtypes

        return numpy.dtype(getattr(ml_dtypes, spec.dtype))
    except (ImportError, AttributeError):
        raise Unsupported(
            f"numpy has no {spec.dtype}: use torch.from_dlpack(received), or install the package ml_dtypes"
        ) from None
