"""The code of a bucket: the worker's side, which keeps what the code leaves out, and the server's.

The floating-point values of all pieces make one row of float32, which is coded; whole numbers follow uncoded. A bucket
is coded only if that makes it smaller. The coded value depends on the mode:

- Gradients, and the changes of `DiLoCo`: the value plus the *residual*, the part that earlier codes left out.
- The parameters of `LocalSGD`: their difference to the last answer, from which the worker continued, plus the residual.
- The parameters of `EASGD`: their difference to an estimate that both sides keep, and move by each code and each
  answer. The part that a code leaves out stays in the difference, so there is no residual (Richtarik, Sokolov and
  Fatkhullin, EF21, NeurIPS 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from tensorwire.edge.tensor import DTYPES
from tensorwire.store.compression import FLOATS, Array, compression_of, saturated
from tensorwire.store.half_precision import half_to_single
from tensorwire.store.modes import EASGD, LocalSGD, Mode
from tensorwire.store.sharding import Bucket, StorePlan
from tensorwire.store.store_layout import StoreSpec


class Feedback(Enum):
    """What the difference is taken to, and what becomes of the rest."""

    RESIDUAL = "residual"
    ANSWER = "answer"
    ESTIMATE = "estimate"

    @staticmethod
    def of(mode: Mode) -> Feedback:
        """That of a mode."""
        if isinstance(mode, LocalSGD):
            return Feedback.ANSWER
        return Feedback.ESTIMATE if isinstance(mode, EASGD) else Feedback.RESIDUAL


class _Span(NamedTuple):
    """A floating-point piece: its number in the bucket, its place in the row, its bytes, its dtype."""

    number: int
    row: slice
    offset: int
    length: int
    dtype: str


class CodedBucket:
    """What both sides have in common. ``memory``: the values, laid out as in the bucket's slot."""

    def __init__(self, spec: StoreSpec, bucket: Bucket, memory: memoryview) -> None:
        self.bucket, self.memory = bucket, memory
        self._compression = compression_of(spec.compression)
        self._feedback = Feedback.of(spec.mode)
        self._spans: list[_Span] = []
        self._plain: list[tuple[int, int]] = []  # offset and bytes of pieces that are not coded
        self._count = values = 0
        for number, piece in enumerate(bucket.pieces):
            dtype, count = spec.tensors[piece.tensor].dtype, piece.stop - piece.start
            values += count * DTYPES[dtype]
            if dtype in FLOATS:
                row = slice(self._count, self._count + count)
                self._spans.append(_Span(number, row, piece.offset, count, dtype))
                self._count += count
            else:
                self._plain.append((piece.offset, count * DTYPES[dtype]))
        self._code = self._compression.nbytes(self._count)
        self.nbytes = self._code + sum(nbytes for _, nbytes in self._plain)
        self.smaller = self._count > 0 and self.nbytes < values

    def _row(self, memory: memoryview) -> Array:
        """The values that ``memory`` holds, as float32."""
        row = np.empty(self._count, np.float32)
        for span in self._spans:
            values = _values(memory, span)
            row[span.row] = half_to_single(values) if span.dtype == "bfloat16" else values
        return row

    def _put(self, row: Array) -> None:
        """Rounds values to the dtypes of their pieces in ``memory``."""
        for span in self._spans:
            values = row[span.row]
            _values(self.memory, span)[:] = values if span.dtype == "float32" else saturated(values, span.dtype)

    def _copy_plain(self, source: memoryview, target: memoryview, *, packs: bool) -> None:
        """Copies what is not coded from where it lies behind the code, or (``packs``) to there."""
        at = self._code
        for offset, nbytes in self._plain:
            if packs:
                target[at : at + nbytes] = source[offset : offset + nbytes]
            else:
                target[offset : offset + nbytes] = source[at : at + nbytes]
            at += nbytes


def _values(memory: memoryview, span: _Span) -> Array:
    if not span.length:
        return np.empty(0, np.uint8)
    kind = np.uint16 if span.dtype == "bfloat16" else np.dtype(span.dtype)
    return np.frombuffer(memory, kind, span.length, span.offset)


def encoders(spec: StoreSpec, plan: StorePlan, filled: memoryview) -> dict[int, BucketEncoder]:
    """Those of one worker, by bucket number, of the buckets that are coded.

    ``filled``: memory of the worker's own, laid out as the space, in which it puts what they code.
    """
    if not spec.compression:
        return {}
    buckets = (bucket for each in plan.buckets for bucket in each)
    made = (BucketEncoder(spec, b, filled[b.space : b.space + b.nbytes]) for b in buckets)
    return {each.bucket.number: each for each in made if each.smaller}


def decoders(spec: StoreSpec, buckets: Sequence[Bucket]) -> list[BucketDecoder | None]:
    """Those of a server for one worker: None for a bucket that is not coded."""
    if not spec.compression:
        return [None] * len(buckets)
    made = [BucketDecoder(spec, bucket) for bucket in buckets]
    return [each if each.smaller else None for each in made]


class BucketEncoder(CodedBucket):
    """A worker's side. It fills ``memory``, and codes it into the slot."""

    def __init__(self, spec: StoreSpec, bucket: Bucket, memory: memoryview) -> None:
        super().__init__(spec, bucket, memory)
        self._kept = np.zeros(self._count, np.float32)  # the residual, or the estimate
        self._moved = False  # since then, the server has answered: the estimate is to follow

    def reset(self, answer: memoryview) -> None:
        """The store's values or state were set, and ``answer`` holds the values: nothing is left out of them."""
        self._kept[:] = self._row(answer) if self._feedback is Feedback.ESTIMATE else 0
        self._moved = False

    @np.errstate(all="ignore")
    def encode(self, present: bytes, answer: memoryview, slot: memoryview) -> None:
        """Codes ``memory`` into the first ``nbytes`` of a slot.

        Args:
            present: A byte a piece: 0 where there is no value. Such a piece keeps its residual.
            answer: The last that the server has answered.
            slot: The slot.
        """
        self._copy_plain(self.memory, slot, packs=True)
        here = [span for span in self._spans if present[span.number]]
        if not here:
            return  # a server does not look at it
        row = self._row(self.memory)
        if self._feedback is Feedback.ANSWER:
            row -= self._row(answer)
        elif self._feedback is Feedback.ESTIMATE:
            if self._moved:
                self._kept -= self._row(answer)
            row -= self._kept
        if self._feedback is not Feedback.ESTIMATE:
            row += self._kept
        if len(here) < len(self._spans):
            for span in self._spans:
                if not present[span.number]:
                    row[span.row] = 0
        code = np.frombuffer(slot, np.uint8, self._code)
        self._compression.encode(row, code)
        arrives = np.empty_like(row)
        self._compression.decode(code, arrives)
        if self._feedback is Feedback.ESTIMATE:
            self._kept += arrives
            self._moved = True
        else:
            self._keep(here, row, arrives)

    def _keep(self, here: Iterable[_Span], row: Array, arrives: Array) -> None:
        """The residual: what does not arrive. What is not finite leaves none."""
        row -= arrives
        row[~np.isfinite(row)] = 0
        for span in here:
            self._kept[span.row] = row[span.row]


class BucketDecoder(CodedBucket):
    """A server's side, for one worker. ``memory`` is what the rule sees."""

    def __init__(self, spec: StoreSpec, bucket: Bucket) -> None:
        super().__init__(spec, bucket, np.zeros(bucket.nbytes, np.uint8).data)
        self._known = None if self._feedback is Feedback.RESIDUAL else np.zeros(self._count, np.float32)

    @np.errstate(all="ignore")
    def decode(self, slot: memoryview) -> None:
        """``memory`` becomes what the code in a slot says. Raises `ProtocolError`."""
        row = np.empty(self._count, np.float32)
        self._compression.decode(np.frombuffer(slot, np.uint8, self._code), row)
        if self._known is not None:
            row += self._known
            if self._feedback is Feedback.ESTIMATE:
                self._known[:] = row
        self._put(row)
        self._copy_plain(slot, self.memory, packs=False)

    @np.errstate(all="ignore")
    def answered(self, answer: memoryview, *, first: bool) -> None:
        """The worker is sent this. ``first``: the store's values, whatever the mode."""
        if self._known is None:
            return
        if self._feedback is Feedback.ESTIMATE and not first:
            self._known -= self._row(answer)
        else:
            self._known[:] = self._row(answer)
