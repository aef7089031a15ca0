"""Memory for tensors that torch did not allocate, and its lifetime."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from tensorwire.errors import ArgumentError
from tensorwire.observe import counters

ALIGNMENT = 64  # of torch's own memory. Elsewhere some kernels compute other bits.

# What storages lie over that `MemoryTarget.lay` made, by address. It lives as long as they do.
_laid: WeakValueDictionary[int, memoryview] = WeakValueDictionary()

_PACKED = struct.Struct("@PNP")  # as allocator.cpp has it: address, nbytes, owner


class MemoryTarget:
    """Memory for the storage of one tensor: ``nbytes`` bytes of ``owner`` from ``offset`` on, to the end by default.

    ``owner`` is any object with a writable, contiguous buffer whose memory stays where it is. Every storage that is
    born here keeps it, and so does the place: when all are gone, the memory is free.
    Raises `ArgumentError` for another object, for an address that is not a multiple of 64, and beyond the buffer's end.
    """

    __slots__ = ("address", "nbytes", "offset", "owner", "packed")

    def __init__(self, owner: Any, *, offset: int = 0, nbytes: int | None = None) -> None:
        room = _writable(owner)
        self.nbytes = room - offset if nbytes is None else nbytes
        if offset < 0 or self.nbytes < 0 or offset + self.nbytes > room:
            raise ArgumentError(f"{self.nbytes} bytes at {offset} do not lie within the {room} bytes of their owner")
        self.owner, self.offset = owner, offset
        self.address = 0  # if there are no bytes, as everywhere in torch
        if self.nbytes:
            flat = torch.frombuffer(owner, dtype=torch.uint8, count=self.nbytes, offset=offset)
            self.address = flat.data_ptr()
        if self.address % ALIGNMENT:
            raise ArgumentError(f"a birthplace must be at a multiple of {ALIGNMENT} bytes, not at {self.address:#x}")
        self.packed = _PACKED.pack(self.address, self.nbytes, id(owner))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of ``tensor`` is this memory."""
        # The cheap question first: nearly all outputs begin where their storage does.
        return tensor.data_ptr() == self.address or tensor.untyped_storage().data_ptr() == self.address

    def lay(self) -> torch.Tensor:
        """A new storage over this memory, as a tensor of bytes; it keeps the owner."""
        if not self.nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        # An array of numpy's would not do: it may keep the owner's base in the owner's stead.
        view = memoryview(self.owner).cast("B")[self.offset : self.offset + self.nbytes]
        _laid[self.address] = view
        return torch.frombuffer(view, dtype=torch.uint8)

    @property
    def laid(self) -> bool:
        """Whether a storage that ``lay`` made still lives."""
        return self.address in _laid


def over(
    owner: Any, *, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0
) -> torch.Tensor:
    """A tensor over the memory of ``owner``, ``offset`` bytes into it; it keeps ``owner``. Contiguous by default.

    ``strides`` are in elements. A tensor of no elements needs no memory, and keeps nothing.
    Raises `ArgumentError` if ``owner`` has no writable buffer, or not so much, and for negative lengths and strides.
    """
    room = _writable(owner)
    if min(shape, default=0) < 0 or (
        strides is not None and (len(strides) != len(shape) or min(strides, default=0) < 0)
    ):
        raise ArgumentError(f"as many strides as lengths, none negative; not {tuple(shape)} and {strides}")
    if 0 in shape:
        like = torch.empty(shape, dtype=dtype, device="cpu")
        return like if strides is None else like.as_strided_(shape, strides)
    if strides is None:
        count = math.prod(shape)
    else:
        count = 1 + sum([(length - 1) * stride for length, stride in zip(shape, strides, strict=True)])
    if offset < 0 or offset + count * dtype.itemsize > room:
        raise ArgumentError(
            f"{count} elements of {dtype} at {offset} do not lie within the {room} bytes of their owner"
        )
    flat = torch.frombuffer(owner, dtype=dtype, count=count, offset=offset)
    # In place, so that it is nobody's view.
    return flat.resize_(shape) if strides is None else flat.as_strided_(shape, strides)


def copied(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A tensor like ``tensor`` in the storage of ``target``, as many bytes: one copy, counted.

    The storage is copied as a whole, so that strides and gaps stay what they are.
    """
    target.copy_(_bytes_of(tensor))
    counters.add(copies=1, copied_bytes=target.numel())
    like = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return like.set_(target.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits in their storages, and lie in them in the same way."""
    lie = [(t.dtype, t.size(), t.stride(), t.storage_offset()) for t in (one, other)]
    return lie[0] == lie[1] and torch.equal(_bytes_of(one), _bytes_of(other))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())


def _writable(owner: Any) -> int:
    """Bytes of its buffer."""
    try:
        view = memoryview(owner)
    except TypeError:
        raise ArgumentError(
            f"a tensor must lie in an object with the buffer protocol, which {type(owner).__name__} lacks"
        ) from None
    if view.readonly or not view.c_contiguous:
        raise ArgumentError(
            f"a tensor must lie in writable, contiguous memory; that of this {type(owner).__name__} is not"
        )
    return view.nbytes
