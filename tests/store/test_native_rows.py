"""Rows of a table by their numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tensorwire._native import add_rows, take_rows


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [0, 1, 3, 200])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_rows_are_taken_and_added_to_as_numpy_does(dtype: type, width: int, count: int) -> None:
    random = np.random.default_rng(width + count)
    table = random.normal(size=(50, width)).astype(dtype)
    indices = random.integers(0, 50, count).astype(np.uint32)  # with some twice
    rows = random.normal(size=(count, width)).astype(dtype)
    taken, wanted, row = np.empty_like(rows), table.copy(), width * table.itemsize
    if not width and count:
        with pytest.raises(IndexError):
            take_rows(taken, table, indices, row)
        return
    take_rows(taken, table, indices, row)
    assert np.array_equal(taken, table[indices])
    np.add.at(wanted, indices, rows)
    add_rows(table, indices, rows, row, dtype is np.float64)
    assert np.array_equal(table, wanted)


def test_what_does_not_fit_changes_nothing() -> None:
    table, rows = np.zeros((4, 2), np.float32), np.ones((2, 2), np.float32)
    with pytest.raises(IndexError, match="no row of that number"):
        add_rows(table, np.array([0, 4], np.uint32), rows, 8, False)
    with pytest.raises(IndexError, match="no row of that number"):
        take_rows(rows, table, np.array([0, 4], np.uint32), 8)
    with pytest.raises(ValueError, match="as many as their numbers"):
        add_rows(table, np.array([0], np.uint32), rows, 8, False)
    with pytest.raises(ValueError, match="aligned"):
        add_rows(table, np.array([0, 1, 2, 3], np.uint32), rows, 4, True)
    with pytest.raises((BufferError, ValueError)):
        add_rows(table, np.array([0, 1], np.uint32), np.ones((2, 4), np.float32)[:, ::2], 8, False)
    table.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        add_rows(table, np.array([0, 1], np.uint32), rows, 8, False)
    assert not table.any()
    assert rows.all()
