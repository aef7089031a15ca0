"""Which bytes a view of a tensor has: the runs in which one view is copied into another, and which sets share a byte.

Views are given as tensors, of which only shape, strides, offset and dtype count: those of a version are on the device
``meta``, and their storage is the tensor in the file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

SHORTEST = 256  # bytes of a run that is read by itself, where there are several
_GAPS = 16  # times as many bytes as are wanted are read at most, where runs are shorter
Rows = npt.NDArray[np.int64]


def runs(source: torch.Tensor, target: torch.Tensor, shortest: int = 0) -> Rows | None:
    """How to copy ``source`` into ``target``, which has the same shape and dtype.

    Rows of three numbers: where a run begins in the source's storage and in the target's, and its length, all in bytes.
    None: there are several, of less than ``shortest`` bytes each.
    """
    if not source.numel():
        return np.zeros((0, 3), np.int64)
    merged: list[tuple[int, int, int]] = []  # strides in both, and size, of dimensions that are one in neither
    steps = zip(target.stride(), source.stride(), source.shape, strict=True)
    for to, of, count in sorted((each for each in steps if each[2] > 1), reverse=True):
        outer = merged.pop()[2] if merged and merged[-1][:2] == (to * count, of * count) else 1
        merged.append((to, of, outer * count))
    run = merged.pop()[2] if merged and merged[-1][:2] == (1, 1) else 1
    size = source.dtype.itemsize
    if merged and run * size < shortest:
        return None
    starts = np.array([[source.storage_offset(), target.storage_offset()]], np.int64)
    for to, of, count in merged:
        starts = (starts[:, None] + np.arange(count)[:, None] * (of, to)).reshape(-1, 2)
    return np.column_stack((starts, np.full(len(starts), run))) * size


def pack(view: torch.Tensor) -> tuple[Rows, torch.Tensor]:
    """How to read a view into memory of its own, in the order in which its elements lie in the source.

    Returns the runs, and the view, on the device ``meta``, of that memory. An element that is repeated is read once.
    Where runs would be short, what lies between them is read, too, unless that is far more.
    """
    once, strides, size = _once(view), view.stride(), view.dtype.itemsize
    dense, packed = 1, [0] * view.dim()
    for i in sorted(range(view.dim()), key=strides.__getitem__):
        if strides[i]:
            packed[i] = dense
            dense *= view.shape[i]
    target = torch.empty_strided(once.shape, packed, dtype=view.dtype, device="meta")
    rows = runs(once, target, SHORTEST)
    most = once.numel() * (_GAPS if rows is None else 1)  # windows have elements several times
    if once.numel() and _extent(once) < most:
        rows, packed = np.array([[view.storage_offset(), 0, _extent(once)]], np.int64) * size, [*strides]
    if rows is None:
        rows = runs(once, target)
    assert rows is not None
    return rows, torch.empty_strided(view.shape, packed, dtype=view.dtype, device="meta")


def touched(tensor: torch.Tensor) -> Rows:
    """The bytes of this process's memory that a tensor has: rows of the first one's address, and the end's."""
    once = _once(tensor)
    rows = runs(once, once, SHORTEST)
    if rows is None:
        at = tensor.storage_offset()
        rows = np.array([[at, at, _extent(once)]], np.int64) * tensor.dtype.itemsize
    return spans(rows, tensor)


def spans(rows: Rows, target: torch.Tensor) -> Rows:
    """Where runs into ``target`` go in this process's memory: rows as of `touched`."""
    return target.untyped_storage().data_ptr() + np.column_stack((rows[:, 1], rows[:, 1] + rows[:, 2]))


def crowded(sets: Sequence[Rows]) -> set[int]:
    """Which sets of spans, rows as of `touched`, have a byte that another set, or another of their own spans, has."""
    if not sets:
        return set()
    rows, owners = np.concatenate(sets), np.repeat(np.arange(len(sets)), [*map(len, sets)])
    order = np.argsort(rows[:, 0], kind="stable")
    starts, ends = rows[order, 0], np.maximum.accumulate(rows[order, 1])
    group = np.cumsum(np.concatenate(([0], starts[1:] >= ends[:-1])))  # spans of a group touch no other group's
    return {*owners[order][np.bincount(group)[group] > 1].tolist()} if len(rows) else set()


def _once(view: torch.Tensor) -> torch.Tensor:
    """The view without repetitions."""
    shape = [min(count, 1) if step == 0 else count for count, step in zip(view.shape, view.stride(), strict=True)]
    return view.detach().as_strided(shape, view.stride(), view.storage_offset())


def _extent(view: torch.Tensor) -> int:
    """How many elements there are from a view's first to its last one."""
    return 1 + sum((count - 1) * step for count, step in zip(view.shape, view.stride(), strict=True))
