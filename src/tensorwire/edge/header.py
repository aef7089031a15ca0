"""The header describes a step's payload in a fixed, versioned, little-endian form, the only one on the wire.

It describes a tensor, with its strides, or holds a number. The payload lies after the header, in a region of the
producer, or in other memory that both ends know. docs/edges.md has the layout; the native core writes and checks it.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import NamedTuple, Union

from tensorwire._native import HEADER, pack_header, step_of, unpack_header
from tensorwire.device import RemoteRegion
from tensorwire.edge.tensor import DTYPES, Spec, contiguous
from tensorwire.errors import ArgumentError, ProtocolError

__all__ = ["HEADER", "MOST_BYTES", "Header", "pack_number", "pack_tensor", "step_of", "unpack"]

MOST_DIMENSIONS = 8
MOST_BYTES = 2**63  # of a payload: so that no length or offset overflows, in whatever reads it

_INT, _FLOAT, _SHAPE = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<16Q")
_NO_TYPE, _FLAT, _NOTHING, _NOWHERE = bytes(2), bytes(128), bytes(8), bytes(32)
_NAMES = tuple(DTYPES)

# What a step carries: plain numbers, since an enumeration's cost more than all the rest of a header.
TENSOR, INT, FLOAT, BOOL = range(1, 5)

Number = Union[int, float]  # noqa: UP007  # or a bool, which is an int; as a value, for Python 3.10


class Header(NamedTuple):
    """What a step carries; ``region`` and ``offset``: where a payload lies."""

    kind: int
    step: int
    nbytes: int
    spec: Spec | None = None
    value: Number | None = None
    region: RemoteRegion | None = None
    offset: int = 0


def pack_tensor(slot: memoryview, at: int, step: int, spec: Spec, *, region: bytes = _NOWHERE, offset: int = 0) -> int:
    """Writes the header of a tensor at ``slot[at:]``.

    Args:
        slot: The memory to write to.
        at: Where the header begins in it.
        step: The step that the tensor is of.
        spec: What the tensor is.
        region: The packed remote region that the payload lies in; by default the payload is near the header.
        offset: Where the payload begins: in ``region``, else in the memory that both ends have agreed on.

    Returns:
        The bytes that the header takes.

    Raises:
        ArgumentError: For more than 8 dimensions, and for lengths that cannot be sent.
    """
    dtype, nbytes, shape = _described(spec)
    pack_header(slot, at, TENSOR, dtype, step, nbytes, offset, _NOTHING, region, shape)
    return HEADER


@functools.lru_cache(maxsize=1024)
def _described(spec: Spec) -> tuple[bytes, int, bytes]:
    rank = len(spec.shape)
    if rank > MOST_DIMENSIONS:
        raise ArgumentError(f"an edge carries tensors of up to {MOST_DIMENSIONS} dimensions, not {spec}: reshape it")
    strides = contiguous(spec.shape) if spec.strides is None else spec.strides
    if _reach(spec) >= MOST_BYTES or any(stride >= MOST_BYTES for stride in strides):
        raise ArgumentError(
            f"a tensor of an edge must have fewer than 2**63 bytes, also without its empty dimensions: {spec}"
        )
    rest = (0,) * (MOST_DIMENSIONS - rank)
    return bytes((_NAMES.index(spec.dtype), rank)), spec.nbytes, _SHAPE.pack(*spec.shape, *rest, *strides, *rest)


def _reach(spec: Spec) -> int:
    """Bytes without the empty dimensions: what a reader may compute on the way to strides."""
    return max(math.prod(length or 1 for length in spec.shape) * DTYPES[spec.dtype], spec.nbytes)


def pack_number(slot: memoryview, at: int, step: int, value: Number) -> int:
    """Writes an int, float or bool at ``slot[at:]``; how many bytes it takes.

    Raises `ArgumentError` for integers beyond 64 bits, and anything else.
    """
    # Exactly these types: a numpy scalar is a float, too, and would come out as another type than it went in.
    if type(value) is bool:
        kind, raw = BOOL, _INT.pack(value)
    elif type(value) is int:
        if not -(2**63) <= value < 2**63:
            raise ArgumentError(f"an edge carries integers of 64 bits, not {value}: send it as a tensor")
        kind, raw = INT, _INT.pack(value)
    elif type(value) is float:
        kind, raw = FLOAT, _FLOAT.pack(value)
    else:
        raise ArgumentError(
            f"an edge carries tensors, int, float and bool, not {type(value).__name__}: item() makes numbers of scalars"
        )
    pack_header(slot, at, kind, _NO_TYPE, step, 0, 0, raw, _NOWHERE, _FLAT)
    return HEADER


def unpack(slot: memoryview, at: int, bound: int, memory: int = 0) -> Header:
    """What the header at ``slot[at:]`` says.

    Every byte is read once, so a peer that writes meanwhile changes nothing that was checked.

    Args:
        slot: The memory that it lies in.
        at: Where it begins.
        bound: The most bytes of payload that a tensor may have.
        memory: The bytes of the memory that an offset without a region is in; with 0 there is no such offset.

    Raises:
        ProtocolError: For anything but what the functions above write.
    """
    try:
        kind, dtype, step, nbytes, offset, raw, packed, shape = unpack_header(slot, at, bound, memory)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
    if kind == TENSOR:
        return Header(kind, step, nbytes, _spec(dtype, shape), None, _region(packed), offset)
    number = (_FLOAT if kind == FLOAT else _INT).unpack(raw)[0]
    return Header(kind, step, 0, value=bool(number) if kind == BOOL else number)


@functools.lru_cache(maxsize=1024)
def _spec(described: bytes, packed: bytes) -> Spec:
    (dtype, rank), numbers = described, _SHAPE.unpack(packed)
    return Spec(numbers[:rank], _NAMES[dtype], numbers[MOST_DIMENSIONS : MOST_DIMENSIONS + rank])


@functools.lru_cache(maxsize=1024)
def _region(packed: bytes) -> RemoteRegion | None:
    if packed == _NOWHERE:
        return None
    try:
        return RemoteRegion.unpack(packed)
    except ArgumentError as error:
        raise ProtocolError(f"malformed header: {error}") from None
