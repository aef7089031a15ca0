"""What edges carry: tensors, each of a shape and a dtype."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorwire._native import dtypes, gather
from tensorwire.device.checks import check_plain
from tensorwire.errors import ArgumentError

# Bytes of an element: what numpy and torch share, and the short floats that only torch has. A dtype's place here is
# its number in headers.
DTYPES = dict(dtypes())


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape, dtype and strides of a tensor.

    Attributes:
        shape: Its lengths.
        dtype: The name that numpy and torch give it, such as ``bfloat16``.
        strides: In elements, one per dimension; None for a tensor that lies contiguous, in the order of its indices.

    Raises:
        ArgumentError: For a dtype that no edge carries, a negative length or stride, or another number of strides.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ArgumentError(f"an edge carries {', '.join(DTYPES)}; not {self.dtype!r}")
        if any(length < 0 for length in self.shape):
            raise ArgumentError(f"a tensor's lengths must be 0 or more, not {self.shape}")
        if self.strides is None:
            return
        if len(self.strides) != len(self.shape) or any(stride < 0 for stride in self.strides):
            raise ArgumentError(
                f"a tensor needs one stride per dimension, 0 or more; not {self.strides} of {self.shape}"
            )
        if self.strides == contiguous(self.shape):
            object.__setattr__(self, "strides", None)

    @classmethod
    def of(cls, tensor: Any) -> Spec:
        """Describes a contiguous copy of a tensor.

        Args:
            tensor: A numpy array, a torch tensor, or anything else with a shape and a dtype.

        Returns:
            Its spec.

        Raises:
            ArgumentError: It has no shape or no dtype, or one that no edge carries.
        """
        shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
        if shape is None or dtype is None:
            raise ArgumentError(f"a tensor has a shape and a dtype, which {type(tensor).__name__} lacks")
        return cls(tuple(shape), str(dtype).rpartition(".")[2])  # "torch.float32", "float32"

    @property
    def nbytes(self) -> int:
        """Bytes of payload: from the first element to the last, gaps included."""
        if self.strides is None or 0 in self.shape:
            return math.prod(self.shape) * DTYPES[self.dtype]
        last = sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * DTYPES[self.dtype]

    def __str__(self) -> str:
        strided = "" if self.strides is None else f" with strides {list(self.strides)}"
        return f"{self.dtype}{list(self.shape)}{strided}"


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor of that shape whose elements lie in the order of their indices.

    As in torch, an empty dimension counts as one of length 1.
    """
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(1, shape[dim])
    return tuple(strides)


def check_step(step: Any) -> None:
    """Refuses what is not a step number, such as a tensor in its place. Raises `ArgumentError`."""
    if type(step) is not int and not isinstance(step, numbers.Integral):
        raise ArgumentError(
            f"the step must be an int, not {type(step).__name__}: the step comes first, as in fill(1, tensor)"
        )


def check_tensor(tensor: Any, spec: Spec | None) -> None:
    """Refuses what is not of ``spec``, and what cannot be taken from memory. Raises `ArgumentError`."""
    check_plain("an edge", tensor)
    if spec is not None and (given := Spec.of(tensor)) != spec:
        raise ArgumentError(f"this edge carries {spec}, not {given}")


def copy_tensor(slot: memoryview, tensor: Any, part: bool = False) -> None:
    """Copies the elements of any array on the CPU into ``slot``, in the order of their indices.

    ``part``: as `gather` has it. Raises `ArgumentError` for what has neither the buffer protocol nor DLPack, and for
    other sizes.
    """
    try:
        gather(slot, tensor, part)
    except (TypeError, AttributeError, BufferError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"this {type(tensor).__name__} cannot be copied into its slot: {error}") from None
