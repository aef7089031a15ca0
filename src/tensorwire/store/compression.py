"""Codes that make a push smaller: ``fp16``, ``bf16``, ``2bit(threshold)``, ``topk(fraction)`` and ``int8(block)``.

Each turns float32 values into bytes and back; the number of values alone determines the number of bytes. The same
values give the same bytes on every machine. The worker keeps the part that a code leaves out and adds it to its next
push: *error feedback* (Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014); `bucket_code` does that.

Values that are not finite arrive unchanged or as NaN; only ``topk`` may leave some of them out, but never all.
"""

from __future__ import annotations

import functools
import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorwire.errors import ArgumentError, ProtocolError, Unsupported
from tensorwire.store.half_precision import half_to_single, single_to_half
from tensorwire.store.sharding import ParameterSpec

Array = np.ndarray[Any, Any]
FLOATS = ("float32", "float16", "bfloat16")  # what is coded; whole numbers travel as they are
BLOCK = 256
_LEAST, _MOST = 1e-37, 3e38  # a threshold is to be a float32


class Compression(ABC):
    """A code with its setting. ``str()`` is its name, as `parse_compression` takes it."""

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """The size of the code of so many values."""

    @abstractmethod
    def encode(self, values: Array, out: Array) -> None:
        """Writes the code of float32 ``values`` into ``out``, bytes of just its size."""

    @abstractmethod
    def decode(self, code: Array, values: Array) -> None:
        """Sets float32 ``values`` to what the bytes ``code`` say. Raises `ProtocolError` for what is no code."""


@dataclass(frozen=True)
class Half(Compression):
    """float16 or bfloat16, 2 bytes a value. What is too large becomes the largest number: 65,504 in float16."""

    dtype: str

    def nbytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Array, out: Array) -> None:
        out.view(np.uint16)[:] = saturated(values, self.dtype).view(np.uint16)

    def decode(self, code: Array, values: Array) -> None:
        values[:] = half_to_single(code.view(np.float16 if self.dtype == "float16" else np.uint16))

    def __str__(self) -> str:
        return "fp16" if self.dtype == "float16" else "bf16"


@dataclass(frozen=True)
class TwoBits(Compression):
    """Each value becomes ``-threshold``, 0 or ``threshold``: 16 values in 4 bytes; the fourth pattern says NaN.

    Source: Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech 2015. MXNet's
    ``2bit`` does the same.
    """

    threshold: float

    def nbytes(self, count: int) -> int:
        return (count + 15) // 16 * 4

    def encode(self, values: Array, out: Array) -> None:
        limit = np.float32(self.threshold)
        patterns = np.zeros(4 * len(out), np.uint8)
        mine = patterns[: len(values)]
        mine += values >= limit
        mine += 2 * (values <= -limit).view(np.uint8)
        mine[~np.isfinite(values)] = 3
        fours = patterns.reshape(-1, 4)
        out[:] = fours[:, 0] | fours[:, 1] << 2 | fours[:, 2] << 4 | fours[:, 3] << 6

    def decode(self, code: Array, values: Array) -> None:
        values[:] = _four_values(self.threshold)[code].reshape(-1)[: len(values)]

    def __str__(self) -> str:
        return f"2bit({self.threshold!r})"


@functools.lru_cache(maxsize=8)
def _four_values(threshold: float) -> Array:
    """By byte: the values that it stands for."""
    one = np.array([0, threshold, -threshold, np.nan], np.float32)
    codes = np.arange(256)
    return np.stack([one[codes >> shift & 3] for shift in (0, 2, 4, 6)], axis=1)


@dataclass(frozen=True)
class TopK(Compression):
    """The ``ceil(fraction * count)`` values of largest magnitude, 8 bytes each; all others become 0.

    Of values of the same magnitude the first ones are taken. Indices come first, in ascending order, as uint32, then
    the values. What is not finite counts as largest.

    Source: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017; Lin et al., Deep
    Gradient Compression, ICLR 2018.
    """

    fraction: float

    def _chosen(self, count: int) -> int:
        return math.ceil(self.fraction * count)

    def nbytes(self, count: int) -> int:
        return 8 * self._chosen(count)

    def encode(self, values: Array, out: Array) -> None:
        if not len(out):
            return
        count = self._chosen(len(values))
        size = values.view(np.uint32) & np.uint32(0x7FFFFFFF)  # ordered as the magnitudes are, NaN last
        least = np.partition(size, len(size) - count)[len(size) - count]  # a value: no order of equals is in it
        taken = size > least
        taken[np.flatnonzero(size == least)[: count - np.count_nonzero(taken)]] = True
        indices = np.flatnonzero(taken)
        out[: 4 * count].view(np.uint32)[:] = indices
        out[4 * count :].view(np.float32)[:] = values[indices]

    def decode(self, code: Array, values: Array) -> None:
        values[:] = 0
        if not len(code):
            return
        indices = code[: len(code) // 2].view(np.uint32)
        if indices.max() >= len(values):
            raise ProtocolError(f"a worker's code names value {indices.max()}, and there are {len(values)}")
        values[indices] = code[len(code) // 2 :].view(np.float32)

    def __str__(self) -> str:
        return f"topk({self.fraction!r})"


# The largest scale of which 127 times is finite: one that was rounded up would turn the largest float32 into inf.
_MOST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))


@dataclass(frozen=True)
class Blocks(Compression):
    """Blocks of values share a float32 scale, their largest magnitude over 127; each value is a multiple in one byte.

    All scales come first. A block with a value that is not finite arrives as NaN.

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, for 8 bits; Dettmers et al.,
    8-bit Optimizers via Block-wise Quantization, ICLR 2022, for blocks.
    """

    block: int = BLOCK

    def _scales(self, count: int) -> int:
        return -(-count // self.block)

    def nbytes(self, count: int) -> int:
        return 4 * self._scales(count) + count

    def encode(self, values: Array, out: Array) -> None:
        scales = out[: 4 * self._scales(len(values))].view(np.float32)
        bytes_ = out[scales.nbytes :].view(np.int8)
        for blocks, start, stop in self._runs(len(values)):
            rows = values[start:stop].reshape(len(scales[blocks]), -1)
            largest = np.abs(rows).max(axis=1)
            scale = np.where(np.isfinite(largest), largest / np.float32(127), np.float32(np.nan))
            scale = np.minimum(scale, _MOST_SCALE)
            multiples = rows / np.where(scale > 0, scale, np.float32(1))[:, None]
            multiples[np.isnan(scale)] = 0
            scales[blocks] = scale
            bytes_[start:stop] = np.clip(np.rint(multiples), -127, 127).reshape(-1)

    def decode(self, code: Array, values: Array) -> None:
        scales = code[: 4 * self._scales(len(values))].view(np.float32)
        bytes_ = code[scales.nbytes :].view(np.int8)
        for blocks, start, stop in self._runs(len(values)):
            rows = values[start:stop].reshape(len(scales[blocks]), -1)
            np.multiply(bytes_[start:stop].reshape(rows.shape), scales[blocks, None], out=rows)

    def _runs(self, count: int) -> list[tuple[slice, int, int]]:
        """The blocks that are full, and the rest: which scales are theirs, and from where to where they go."""
        full, end = count // self.block, count // self.block * self.block
        runs = [(slice(0, full), 0, end), (slice(full, full + 1), end, count)]
        return [run for run in runs if run[1] < run[2]]

    def __str__(self) -> str:
        return f"int8({self.block})"


def saturated(values: Array, dtype: str) -> Array:
    """float32 values as ``"float16"``, or as the bits of ``"bfloat16"``: finite ones stay finite."""
    found = single_to_half(values, dtype)
    bits = found.view(np.uint16)
    beyond = bits & np.uint16(0x7FFF) == np.uint16(0x7C00 if dtype == "float16" else 0x7F80)
    beyond &= np.isfinite(values)
    if beyond.any():
        bits[beyond] -= np.uint16(1)  # the largest number is next to infinity
    return found


# ---- names

_TEXT = re.compile(r"(fp16|bf16|2bit|topk|int8)(?:\(([^()]*)\))?")
_NAMES = "'fp16', 'bf16', '2bit(threshold)', 'topk(fraction)' or 'int8(block)'"


def parse_compression(text: object) -> Compression | None:
    """The compression of that name; None for None. Raises `ArgumentError`."""
    if text is None:
        return None
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ArgumentError(f"compression must be {_NAMES}, or None, not {text!r:.100}")
    name, setting = found.groups()
    if name in ("fp16", "bf16"):
        if setting is not None:
            raise ArgumentError(f"compression={name!r} has no setting, and there is {setting!r:.100}")
        return Half("float16" if name == "fp16" else "bfloat16")
    if name == "int8":
        return Blocks(_block(setting))
    number = _number(setting)
    if name == "topk":
        if not 0 < number < 1:
            raise ArgumentError(f"topk needs a fraction above 0 and below 1, as in 'topk(0.01)', not {text!r:.100}")
        return TopK(number)
    if not _LEAST < number < _MOST:
        raise ArgumentError(f"2bit needs a threshold above 0, as in '2bit(0.5)', not {text!r:.100}")
    return TwoBits(number)


def compression_of(name: str) -> Compression:
    """The compression of a name that is one."""
    found = parse_compression(name)
    assert found is not None
    return found


def _block(setting: str | None) -> int:
    if setting is None:
        return BLOCK
    if not re.fullmatch(r"[0-9]{1,9}", setting) or not int(setting):
        raise ArgumentError(f"int8 needs a block of 1 or more values, as in 'int8(256)', not {setting!r:.100}")
    return int(setting)


def _number(setting: str | None) -> float:
    """The number, or NaN for what is none, which is in no range."""
    try:
        return float(setting or "nan")
    except ValueError:
        return math.nan


def check_dtypes(tensors: list[ParameterSpec]) -> None:
    """Raises `Unsupported` for tensors that a code would harm: it computes in float32."""
    for t in tensors:
        if t.dtype == "float64":
            raise Unsupported(
                f"compression computes in float32, and {t.name!r} is of float64: convert it to float32, or leave out "
                "compression"
            )
