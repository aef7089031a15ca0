"""The gradient of a table in one step: the sum of all lookups and passes of that step, which is pushed once.

Servers update rows by what one push has, and a step of training has one update, however often a table was looked into.
"""

from __future__ import annotations

import sys
from functools import partial

import numpy as np

from tensorwire.keyvalue.row_table import Table
from tensorwire.launch.worker import Worker
from tensorwire.store.row_layout import Array


class RowSums:
    """What was added since the last push. ``what``: the table, for a warning at the end of the job."""

    def __init__(self, worker: Worker, table: Table, what: str) -> None:
        self._table = table
        self._waiting: list[tuple[Array, Array]] = []
        worker.at_close(partial(_warn, what, self._waiting), owner=self)

    @property
    def waiting(self) -> bool:
        """Whether there is something to push."""
        return bool(self._waiting)

    def add(self, indices: Array, rows: Array) -> None:
        """Adds rows, which stay as they are from now on."""
        self._waiting.append((indices, rows))

    def drop(self) -> None:
        """Forgets what was added."""
        self._waiting.clear()

    def push(self) -> None:
        """Pushes the sum, if there is one. Raises `ArgumentError`, `WaitTimeout` or `JobEnded`."""
        if not self._waiting:
            return
        indices, rows = zip(*self._waiting, strict=True)
        self._waiting.clear()
        self._table.push(*self._table.given(np.concatenate(indices), np.concatenate(rows)))


def _warn(what: str, waiting: list[tuple[Array, Array]]) -> None:
    if waiting:
        sys.stderr.write(
            f"tensorwire: warning: gradients of {what} from {len(waiting)} backward passes were not pushed, because no "
            "step() came after them\n"
        )
        sys.stderr.flush()
        waiting.clear()  # no step of another job is to push them
