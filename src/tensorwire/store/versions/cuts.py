"""The messages of a cut: from worker 0 to every shard, from every shard to the publisher, and the word that allows one.

The *grant* is a word of worker 0 that the publisher raises: it says whether there is a buffer for the next version.
With a grant worker 0 makes a *cut*: it tells every shard to put the state that it has then into that buffer. Each shard
*reports* to the publisher when its part is there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from tensorwire.edge import Word
from tensorwire.errors import ProtocolError

_CUT = struct.Struct("<4sIQQQQ")  # magic, buffer, counter, round, run, step
_MAGIC = b"TWCT"
CUT_BYTES = _CUT.size
_REPORT_HEAD = 4  # numbers before the buckets': counter, buffer, run, step
_STEPS = 512  # of the grant's word for each version
_GRANTED = 256


@dataclass(frozen=True, slots=True)
class Cut:
    """Version ``counter`` is the state after round ``round``, where rounds are common to all workers.

    ``buffer``: where it goes. ``run``, ``step``: as in `Manifest`.
    """

    counter: int
    buffer: int
    round: int
    run: int
    step: int

    def pack(self) -> bytes:
        """As it travels."""
        return _CUT.pack(_MAGIC, self.buffer, self.counter, self.round, self.run, self.step)


def unpack_cut(block: memoryview | bytes) -> Cut:
    """Raises `ProtocolError` for anything but what `Cut.pack` made."""
    if len(block) < CUT_BYTES:
        raise ProtocolError("a worker's cut is cut off")
    magic, buffer, counter, round, run, step = _CUT.unpack_from(block)
    if magic != _MAGIC:
        raise ProtocolError("a worker's cut is malformed")
    return Cut(counter, buffer, round, run, step)


def granted(counter: int, buffer: int) -> int:
    """The grant's word: version ``counter`` may go to ``buffer``."""
    return counter * _STEPS + _GRANTED + buffer


def held(counter: int) -> int:
    """The grant's word: readers hold all that version ``counter`` could go to. A grant may follow."""
    return counter * _STEPS


def _granted_buffer(word: int, counter: int) -> int | None:
    """The buffer that the word grants to version ``counter``; None: none yet."""
    at = word - granted(counter, 0)
    return at if 0 <= at < _STEPS - _GRANTED else None


def await_grant(
    grant: Word, counter: int, wait: Callable[[Callable[[float], object]], None], *, patient: bool
) -> int | None:
    """Worker 0: the buffer for version ``counter``; None: readers hold all, and it is not ``patient``.

    ``wait(call)`` waits by ``call(seconds)``, as this worker waits for answers.
    """
    wait(partial(grant.wait, held(counter)))
    buffer = _granted_buffer(grant.value, counter)
    if buffer is None and patient:
        wait(partial(grant.wait, granted(counter, 0)))
        buffer = _granted_buffer(grant.value, counter)
    return buffer


def report_bytes(buckets: int) -> int:
    """The size of a shard's report."""
    return 8 * (_REPORT_HEAD + 2 * buckets)


class CutReport:
    """A shard's report in ``memory``: its part of a cut is in the buffer.

    Attributes:
        checksums: By bucket of the shard, xxh3 of its elements.
        updates: By bucket: how many it has had.
    """

    def __init__(self, memory: memoryview, buckets: int) -> None:
        self._head = np.frombuffer(memory, np.uint64, _REPORT_HEAD)
        self.checksums: npt.NDArray[np.uint64] = np.frombuffer(memory, np.uint64, buckets, 8 * _REPORT_HEAD)
        self.updates: npt.NDArray[np.uint64] = np.frombuffer(memory, np.uint64, buckets, 8 * (_REPORT_HEAD + buckets))

    def begin(self, cut: Cut) -> None:
        """What it reports of."""
        self._head[:] = cut.counter, cut.buffer, cut.run, cut.step

    @property
    def cut(self) -> Cut:
        """What it reports of, without the round."""
        counter, buffer, run, step = map(int, self._head)
        return Cut(counter, buffer, 0, run, step)
