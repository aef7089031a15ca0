"""What edges carry: tensors, each of a shape and a dtype."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from tensorwire._native import gather
from tensorwire.device.contract import check_plain
from tensorwire.errors import ArgumentError

# Bytes of an element: what numpy and torch share, and the short floats that only torch has. A dtype's place here is
# its number in headers: new ones go to the end.
DTYPES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype of a tensor. ``dtype`` is the name that numpy and torch give it, such as ``bfloat16``.

    Raises `ArgumentError` for a dtype that no edge carries, and for a negative length.
    """

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ArgumentError(f"an edge carries {', '.join(DTYPES)}; not {self.dtype!r}")
        if any(length < 0 for length in self.shape):
            raise ArgumentError(f"a tensor's lengths are 0 or more, not {self.shape}")

    @classmethod
    def of(cls, tensor: Any) -> Spec:
        """The spec of a numpy array, a torch tensor, or anything else with ``shape`` and ``dtype``."""
        shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
        if shape is None or dtype is None:
            raise ArgumentError(f"a tensor has a shape and a dtype; {type(tensor).__name__} has not")
        return cls(tuple(shape), str(dtype).rpartition(".")[2])  # "torch.float32", "float32"

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return math.prod(self.shape) * DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def check_step(step: Any) -> None:
    """Refuses what is no number of a step, such as a tensor in its place. Raises `ArgumentError`."""
    if type(step) is not int and not isinstance(step, numbers.Integral):
        raise ArgumentError(f"a step is an int, not {type(step).__name__}: the step comes first, as in fill(1, tensor)")


def check_tensor(tensor: Any, spec: Spec | None) -> None:
    """Refuses what is not of ``spec``, and what cannot be taken from memory. Raises `ArgumentError`."""
    check_plain("an edge", tensor)
    if spec is not None and (given := Spec.of(tensor)) != spec:
        raise ArgumentError(f"this edge carries {spec}, not {given}")


def copy_tensor(slot: memoryview, tensor: Any) -> None:
    """Copies the elements of any array on the CPU into ``slot``, in the order of their indices.

    Raises `ArgumentError` for what has neither the buffer protocol nor DLPack, and for other sizes.
    """
    try:
        gather(slot, tensor)
    except (TypeError, AttributeError, BufferError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"this {type(tensor).__name__} cannot be copied into its slot: {error}") from None
