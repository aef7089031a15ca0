"""The header describes a step's payload in a fixed, versioned, little-endian form, the only one on the wire.

It describes a tensor, with its strides, or holds a number. The payload lies after the header, in a region of the
producer, or in other memory that both ends know. docs/edges.md has the layout.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import NamedTuple, Union

from tensorwire.device import RemoteRegion
from tensorwire.edge.tensor import DTYPES, Spec, contiguous
from tensorwire.errors import ArgumentError, ProtocolError

HEADER = 256  # bytes; what follows is aligned like the slot
MOST_DIMENSIONS = 8
MOST_BYTES = 2**63  # of a payload: so that no length or offset overflows, in whatever reads it

_MAGIC = b"TWEH"
_VERSION = 2
# magic, version, kind, dtype and rank, step, bytes of payload, offset, value, remote region, lengths and strides
_WIRE = struct.Struct("<4sBB2sQQQ8s32s128s56x")
_STEP = struct.Struct("<8xQ")
_INT, _FLOAT, _SHAPE = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<16Q")
_NO_TYPE, _FLAT, _NOTHING, _NOWHERE = bytes(2), bytes(128), bytes(8), bytes(32)
assert _WIRE.size == HEADER
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
    _WIRE.pack_into(slot, at, _MAGIC, _VERSION, TENSOR, dtype, step, nbytes, offset, _NOTHING, region, shape)
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


def step_of(slot: memoryview, at: int) -> int:
    """The step of the header at ``slot[at:]``, unchecked: whether it is worth reading."""
    step: int = _STEP.unpack_from(slot, at)[0]
    return step


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
    _WIRE.pack_into(slot, at, _MAGIC, _VERSION, kind, _NO_TYPE, step, 0, 0, raw, _NOWHERE, _FLAT)
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
        magic, version, kind, dtype, step, nbytes, offset, raw, packed, shape = _WIRE.unpack_from(slot, at)
    except struct.error:
        raise ProtocolError(f"a slot of an edge begins with a header of {HEADER} bytes; this one is shorter") from None
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError(
            "not a header of this version of Tensorwire: use the same version and kind of edge at both ends"
        )
    if kind == TENSOR:
        spec = _spec(dtype, nbytes, shape)
        if nbytes > bound:
            raise ProtocolError(f"a tensor of {nbytes} bytes on an edge for {bound}: the same bound at both ends")
        if raw != _NOTHING:
            raise ProtocolError("malformed header: a tensor with a number")
        region = _region(packed)
        if offset + nbytes > (memory if region is None else region.length) and (offset or region is not None):
            raise ProtocolError(f"malformed header: {nbytes} bytes at {offset} of {region or memory}")
        return Header(kind, step, nbytes, spec, None, region, offset)
    if dtype != _NO_TYPE or shape != _FLAT or packed != _NOWHERE or offset or nbytes:
        raise ProtocolError("malformed header: a number with a shape or a payload")
    return Header(kind, step, 0, value=_number(kind, raw))


@functools.lru_cache(maxsize=1024)
def _spec(described: bytes, nbytes: int, packed: bytes) -> Spec:
    (dtype, rank), numbers = described, _SHAPE.unpack(packed)
    lengths, strides = numbers[:MOST_DIMENSIONS], numbers[MOST_DIMENSIONS:]
    if dtype >= len(_NAMES) or rank > MOST_DIMENSIONS or any(lengths[rank:]) or any(strides[rank:]):
        raise ProtocolError(f"malformed header: dtype {dtype}, lengths {lengths} and strides {strides} of rank {rank}")
    spec = Spec(lengths[:rank], _NAMES[dtype], strides[:rank])
    if _reach(spec) >= MOST_BYTES or max(strides) >= MOST_BYTES or spec.nbytes != nbytes:
        raise ProtocolError(f"malformed header: {nbytes} bytes for {spec}")
    return spec


@functools.lru_cache(maxsize=1024)
def _region(packed: bytes) -> RemoteRegion | None:
    if packed == _NOWHERE:
        return None
    try:
        return RemoteRegion.unpack(packed)
    except ArgumentError as error:
        raise ProtocolError(f"malformed header: {error}") from None


def _number(kind: int, raw: bytes) -> Number:
    number = _INT.unpack(raw)[0]
    if kind == INT:
        return int(number)
    if kind == FLOAT:
        return float(_FLOAT.unpack(raw)[0])
    if kind == BOOL and number in (0, 1):
        return bool(number)
    raise ProtocolError(f"malformed header: kind {kind}, value {number}")
