"""What every device refuses before it sends anything: operands and memory that no transfer can have."""

from __future__ import annotations

import operator
from typing import Any

from tensorwire.device.region import RemoteView, View
from tensorwire.errors import ArgumentError, RemoteAccessError


def check_plain(what: str, array: Any) -> None:
    """The memory of ``array`` is there, and holds its values and nothing that only this process understands."""
    if array is None:
        raise ArgumentError(f"{what} needs memory with the buffer protocol or DLPack, and got None")
    if getattr(getattr(array, "dtype", None), "hasobject", False):
        raise ArgumentError(f"{what} needs plain numbers: this array holds Python objects")
    # PyTorch's DLPack leaves this out: the negative of what the tensor shows would be taken.
    is_negative = getattr(array, "is_neg", None)
    if callable(is_negative) and is_negative():
        raise ArgumentError(
            f"{what} needs memory that holds the values as they are, and this is a negative view: call "
            "resolve_neg() first"
        )
    if hasattr(array, "untyped_storage"):
        _check_storage(what, array)


def _check_storage(what: str, tensor: Any) -> None:
    """PyTorch shares by DLPack also what only stands for a tensor, and what lost its memory since (``resize_(0)``)."""
    try:
        storage = tensor.untyped_storage()
        end = tensor.storage_offset() + 1
        end += sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed, there = end * tensor.itemsize if tensor.numel() else 0, storage.nbytes()
    except (AttributeError, NotImplementedError, RuntimeError):  # no strides, or no storage: DLPack says what it is
        return
    if storage.device.type == "meta":
        raise ArgumentError(f"{what} needs memory, and a fake or meta tensor has none")
    if needed > there:
        raise ArgumentError(f"{what} needs memory: this tensor's storage has {there} of its {needed} bytes")


def check_sizes(source: int, target: int) -> None:
    """Both ends of a transfer have the same size."""
    if source != target:
        raise ArgumentError(f"sizes differ: {source} bytes into {target}")


def check_word(view: RemoteView) -> None:
    """A signal or atomic word is 8 aligned bytes."""
    if view.nbytes != 8 or view.offset % 8:
        raise ArgumentError("a signal or atomic word must be a view of 8 bytes at a multiple of 8")


def check_fillable(view: View) -> None:
    """A read needs memory that can be written."""
    if not view.region.writable:
        raise ArgumentError("this memory is read-only: a read cannot fill it")


def check_value(*values: int) -> None:
    """A signal or atomic word holds 0 to 2**64 - 1. Raises `TypeError` for what is not an integer."""
    for value in values:
        if not 0 <= operator.index(value) < 2**64:
            raise ArgumentError(f"a word holds 0 to 2**64 - 1, not {value}")


def check_signal(signal: tuple[RemoteView, int] | None) -> None:
    """A signal names a word and a value that it can hold."""
    if signal is not None:
        check_word(signal[0])
        check_value(signal[1])


REFUSALS = {
    1: "no open region has that key",
    2: "out of the region's range",
    3: "the region is read-only for this key",
    4: "the word is not 8-byte aligned",
}


def refused(device: str, code: int) -> RemoteAccessError:
    """The error for a target's refusal."""
    return RemoteAccessError(f"{device}: the target refused: {REFUSALS.get(code, f'code {code}')}")
