"""The head of a round, from a worker to a server: the operation, and the options in force.

It is a fixed block in the server's memory, written one-sided before the gradients, without negotiation and RPC.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum

from tensorwire.errors import ProtocolError

_HEAD = struct.Struct("<4sHHQddII")  # magic, version, operation, step, largest norm, weight, fragment, options
_MAGIC = b"TWRD"
_VERSION = 3
NORM = struct.Struct("<d")  # a sum of squares
LEFT_OUT = -math.inf  # in its place: this step is left out, as no sum of squares can say


class StepOperation(IntEnum):
    """What a round does with what the workers bring."""

    UPDATE = 1  # gradients: reduce, apply the rule
    ASSIGN = 2  # values of worker 0: they become the parameters
    FINISH = 3  # this worker is done
    LOAD = 4  # worker 0's state becomes the optimizers'
    IDLE = 5  # this worker takes no part in rounds until all are idle
    SKIP = 6  # this worker found an inf in its gradients: nobody updates
    JOIN = 7  # this worker is new, and wants the present values
    ABSENT = 8  # this worker is new, and takes part from a later round on


# What people count as steps.
STEPS = (StepOperation.UPDATE, StepOperation.SKIP)


@dataclass(frozen=True, slots=True)
class StepHeader:
    """The head of one worker's round.

    ``max_norm``: what the gradient's norm is clipped to; 0: it is not clipped. ``fragment``: of which buckets the round
    is, where they are divided. ``weight``: what this worker's contribution counts.
    """

    operation: StepOperation
    step: int
    options: tuple[float, ...]
    max_norm: float = 0.0
    weight: float = 1.0
    fragment: int = 0


def header_bytes(options: int) -> int:
    """Size of the block."""
    return _HEAD.size + 8 * options


def pack_header(head: StepHeader) -> bytes:
    """The block's bytes."""
    block = _HEAD.pack(
        _MAGIC, _VERSION, head.operation, head.step, head.max_norm, head.weight, head.fragment, len(head.options)
    )
    return block + struct.pack(f"<{len(head.options)}d", *head.options)


def unpack_header(block: memoryview, options: int) -> StepHeader:
    """Raises `ProtocolError` for anything but what ``pack_header`` made for that many options."""
    magic, version, operation, step, max_norm, weight, fragment, n = _HEAD.unpack_from(block)
    known = operation in StepOperation._value2member_map_
    good = max_norm >= 0 and 0 <= weight < math.inf
    if magic != _MAGIC or version != _VERSION or n != options or not known or not good:
        raise ProtocolError("a worker's round has a malformed head")
    found = struct.unpack_from(f"<{n}d", block, _HEAD.size)
    return StepHeader(StepOperation(operation), step, found, max_norm, weight, fragment)


def clipping(norm: float, max_norm: float) -> float:
    """What gradients of that norm are multiplied by: as ``torch.nn.utils.clip_grad_norm_`` has it."""
    scale = max_norm / (norm + 1e-6)
    return scale if math.isnan(scale) else min(scale, 1.0)
