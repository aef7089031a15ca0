"""What a reader wants of a version, as spans of the file: made once, and read for every version."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ArgumentError
from tensorwire.sizes import round_up
from tensorwire.store.sharding import ALIGNMENT
from tensorwire.store.versions.read_spans import Chosen, ReadSpan, Selection
from tensorwire.store.versions.runs import runs
from tensorwire.store.versions.version_layout import FileTensor


def select(
    held: Mapping[str, FileTensor],
    names: Iterable[str] | None = None,
    slices: Mapping[str, Sequence[slice]] | None = None,
    rows: Mapping[str, object] | None = None,
) -> Selection:
    """What to read for some tensors, or parts of them. ``names``: which; None: all, or those with parts.

    ``slices``: by name, of the first dimensions. ``rows``: by name, the numbers of parts ``tensor[number]``.

    Raises `ArgumentError` for a name that the version does not have, and for slices or rows that do not fit.
    """
    slices, rows = slices or {}, rows or {}
    parts = [*slices, *rows]
    wanted = list(names) if names is not None else list(parts or held)
    if strange := sorted({*wanted, *parts} - held.keys()):
        raise ArgumentError(f"the version has no tensor {strange[0]!r}")
    if both := sorted(slices.keys() & rows.keys()):
        raise ArgumentError(f"{both[0]!r} has slices and rows: give one of them")
    tensors: dict[str, Chosen] = {}
    spans: list[ReadSpan] = []
    end = 0
    for name in sorted(wanted, key=lambda name: held[name].start):
        end = round_up(end, ALIGNMENT)
        if name in rows:
            shape, found = _row_spans(name, held[name], rows[name], end)
        else:
            shape, found = _spans(name, held[name], slices.get(name, ()), end)
        tensors[name] = Chosen(held[name].dtype, shape, end)
        spans += found
        end += sum(span.nbytes for span in found)
    return Selection(tensors, tuple(_joined(spans)), end)


def _spans(name: str, held: FileTensor, slices: Sequence[slice], memory: int) -> tuple[tuple[int, ...], list[ReadSpan]]:
    """The shape of a part of a tensor, and its spans in the order of its elements."""
    parts = tuple(slice(each.start, each.stop) for each in _ranges(name, held, slices))
    chosen = torch.empty(held.shape, dtype=getattr(torch, held.dtype), device="meta")[parts]
    rows = runs(chosen, torch.empty_like(chosen, memory_format=torch.contiguous_format))
    assert rows is not None
    return tuple(chosen.shape), [ReadSpan(held.start + of, memory + to, n) for of, to, n in rows.tolist()]


def _row_spans(name: str, held: FileTensor, given: object, memory: int) -> tuple[tuple[int, ...], list[ReadSpan]]:
    """The same of some rows, in the order in which they are given."""
    numbers = np.asarray(given)
    if not held.shape or numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ArgumentError(
            f"{name!r} {list(held.shape)}: rows are given by a list of whole numbers, not {given!r:.100}"
        )
    if strange := numbers[(numbers < 0) | (numbers >= held.shape[0])][:1].tolist():
        raise ArgumentError(f"{name!r} has rows 0 to {held.shape[0] - 1}, and no row {strange[0]}")
    size = math.prod(held.shape[1:]) * DTYPES[held.dtype]
    places = enumerate((held.start + numbers.astype(np.int64) * size).tolist() if size else ())
    return (len(numbers), *held.shape[1:]), [ReadSpan(file, memory + n * size, size) for n, file in places]


def _ranges(name: str, held: FileTensor, slices: Sequence[slice]) -> list[range]:
    given = tuple(slices) if isinstance(slices, (tuple, list)) else (slices,)
    if len(given) > len(held.shape):
        raise ArgumentError(f"{name!r} has {len(held.shape)} dimensions, and {len(given)} slices are given")
    ranges = []
    for size, part in zip(held.shape, (*given, *[slice(None)] * (len(held.shape) - len(given))), strict=True):
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise ArgumentError(f"{name!r}: a part is given by slices of step 1, not {part!r:.100}")
        for bound in (part.start, part.stop):
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or abs(bound) > size):
                raise ArgumentError(f"{name!r}: {bound!r} is outside of a dimension of {size}")
        ranges.append(range(*part.indices(size)))
    return ranges


def _joined(spans: Sequence[ReadSpan]) -> Iterable[ReadSpan]:
    """The same, as few as possible."""
    last: ReadSpan | None = None
    for span in spans:
        if last is not None and (last.file + last.nbytes, last.memory + last.nbytes) == (span.file, span.memory):
            last = last._replace(nbytes=last.nbytes + span.nbytes)
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last
