"""What a worker tells a server at the head of a round: the operation, the options in force, which gradients exist.

A fixed block in the server's memory, written one-sided before the gradients: no message format to negotiate, no RPC.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tensorwire.errors import ProtocolError

_HEAD = struct.Struct("<4sHHQII")  # magic, version, operation, step, options, tensors
_MAGIC = b"TWRD"
_VERSION = 1


class Operation(IntEnum):
    """What a round does with what the workers bring."""

    UPDATE = 1  # gradients: reduce, apply the rule
    ASSIGN = 2  # values of worker 0: they become the parameters
    FINISH = 3  # this worker is done
    LOAD = 4  # worker 0's state becomes the optimizers'
    IDLE = 5  # this worker takes no part in rounds until all are idle


@dataclass(frozen=True, slots=True)
class Head:
    """The head of one worker's round. ``present[i]`` says whether tensor ``i`` has a gradient there."""

    operation: Operation
    step: int
    options: tuple[float, ...]
    present: bytes


def head_bytes(options: int, tensors: int) -> int:
    """Size of the block."""
    return _HEAD.size + 8 * options + tensors


def pack_head(operation: Operation, step: int, options: Sequence[float], present: bytes) -> bytes:
    """The block's bytes."""
    head = _HEAD.pack(_MAGIC, _VERSION, operation, step, len(options), len(present))
    return head + struct.pack(f"<{len(options)}d", *options) + present


def unpack_head(block: memoryview, options: int, tensors: int) -> Head:
    """Raises `ProtocolError` for anything but what ``pack_head`` made for these counts."""
    magic, version, operation, step, n, m = _HEAD.unpack_from(block)
    if magic != _MAGIC or version != _VERSION or n != options or m != tensors or operation not in list(Operation):
        raise ProtocolError("a worker's round has a malformed head")
    values = struct.unpack_from(f"<{n}d", block, _HEAD.size)
    start = _HEAD.size + 8 * n
    return Head(Operation(operation), step, values, bytes(block[start : start + m]))
