"""The calls of `KeyValue` for keys whose rows are pushed and pulled by their numbers."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Collection
from typing import Any

from tensorwire.errors import ArgumentError
from tensorwire.keyvalue.handle import Calls, Handle
from tensorwire.keyvalue.key_arguments import Key, as_array, as_key, plan_name
from tensorwire.keyvalue.key_versions import KeyVersions
from tensorwire.keyvalue.row_table import Table, check_scale, check_seed, check_shape, most_rows, table_dtype
from tensorwire.keyvalue.table_files import load_on_all, save_table
from tensorwire.launch.worker import Worker
from tensorwire.store.modes import SSP, Async, Sync
from tensorwire.store.row_layout import TableSpec


class RowKeys:
    """The part of `KeyValue` that is about rows."""

    _worker: Worker
    _mode: Sync | Async | SSP
    _rule: str
    _reduce: str
    _group: dict[str, Any]
    _versions: KeyVersions

    def __init__(self, worker: Worker) -> None:
        self._calls = Calls(worker)
        self._tables: dict[Key, Table] = {}

    @abstractmethod
    def _check_new(self, key: Key, made: Collection[Key] = ()) -> None:
        """Refuses what cannot become a key. Raises `ArgumentError`."""

    def init_rows(
        self,
        key: Key,
        shape: tuple[int, ...],
        dtype: str = "float32",
        *,
        values: Any = None,
        initial: str = "zeros",
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Makes a key whose rows are pushed and pulled by their numbers; no worker has to hold all of them.

        Every worker calls it, in the same place of its program. The rules for rows are ``"sum"``, ``"assign"``,
        ``"SGD"`` without momentum, ``"Adagrad"`` and ``"SparseAdam"``.

        Args:
            key: The key.
            shape: Of the whole table; the first length is the number of rows.
            dtype: float32 or float64; with ``"sum"`` and ``"assign"`` also an integer type.
            values: The first values, an array of that shape; worker 0's count. None: the servers make them.
            initial: What they make: ``"zeros"``, ``"normal"`` or ``"uniform"``, the same on any number of servers.
            scale: The standard deviation of ``"normal"``, the bound of ``"uniform"``.
            seed: From which the first values are drawn, 0 or more.

        Raises:
            ArgumentError: The key exists, or an argument is wrong. Nothing was added.
            Unsupported: The table cannot have this dtype. Nothing was added.
            PlanMismatch: The workers' tables differ.
            WaitTimeout: Another worker did not come in time.
            JobEnded: The job ended; the message says why.
        """
        key = as_key(key)
        self._check_new(key)
        shape, dtype = check_shape(shape), table_dtype(key, dtype)
        first = None if values is None else as_array(values)
        if first is not None and (first.shape != shape or first.dtype != dtype):
            raise ArgumentError(
                f"the values for key {key!r} must be {dtype}{list(shape)}, not {first.dtype}{list(first.shape)}"
            )
        check_seed(seed)
        check_scale(scale)
        with self._calls:
            self._tables[key] = Table(
                self._worker,
                plan_name(key),
                shape,
                dtype,
                mode=self._mode,
                rule="assign" if self._rule == "mean" else self._rule,
                options=self._group,
                reduce="mean" if self._rule == "mean" else self._reduce,
                settings=TableSpec(most_rows(shape, dtype), initial, float(scale), seed),
                values=first,
                calls=self._calls,
            )

    def row_sparse_push(self, key: Key, indices: Any, rows: Any) -> Handle:
        """Pushes some rows of a key of `init_rows`; rows that are named twice are summed.

        Each call counts as one push of the key, also with no rows: with `Sync`, all workers have to push.

        Args:
            key: The key.
            indices: Numbers of rows, an integer array of any shape.
            rows: An array of the shape of ``indices`` and that of a row, of the key's dtype.

        Returns:
            Complete when the servers have applied it.

        Raises:
            ArgumentError: There is no such key, or an array does not fit. Nothing was pushed.
            WaitTimeout: The servers took no more requests, because another worker has not pushed.
            JobEnded: The job ended; the message says why.
        """
        table = self._table(key)
        given = table.given(indices, rows)
        with self._calls:
            return Handle(self._calls, (), (table.push(*given),), True)

    def row_sparse_pull(self, key: Key, indices: Any, out: Any = None) -> Handle:
        """Fetches some rows of a key of `init_rows`, each of them once.

        Args:
            key: The key.
            indices: Numbers of rows, an integer array of any shape.
            out: The array to put the rows into. None: a new one.

        Returns:
            Its ``wait()`` returns the rows, in the order of ``indices``: of its shape and that of a row.

        Raises:
            ArgumentError: There is no such key or row, or ``out`` does not fit.
            JobEnded: The job ended; the message says why.
        """
        table = self._table(key)
        with self._calls:
            return Handle(self._calls, (table.pull(indices, None if out is None else as_array(out)),), (), True)

    def save_rows(self, key: Key, folder: str | os.PathLike[str]) -> None:
        """Writes all rows of a key of `init_rows`, and what the rule keeps for them, to a folder of npy files.

        One worker may call it alone, while the others wait at a barrier. It holds no more than some rows in memory.

        Args:
            key: The key.
            folder: The folder, which is replaced as a whole.

        Raises:
            ArgumentError: There is no such key, or the folder cannot be written, or holds anything but a table.
            WaitTimeout: The servers did not answer in time.
            JobEnded: The job ended; the message says why.
        """
        save_table(self._table(key), folder)

    def load_rows(self, key: Key, folder: str | os.PathLike[str]) -> None:
        """Sets all rows of a key, and what the rule keeps for them. Every worker calls it; worker 0 reads the folder.

        Args:
            key: The key.
            folder: A folder that `save_rows` wrote, with any number of servers.

        Raises:
            ArgumentError: There is no such key, or the folder cannot be read, or its values or state do not fit.
                Nothing was changed.
            WaitTimeout: Another worker or a server did not come in time.
            JobEnded: The job ended; the message says why.
        """
        load_on_all(self._table(key), folder)
        self._versions.loaded()

    def _table(self, key: Key) -> Table:
        self._calls.check()
        key = as_key(key)
        if key not in self._tables:
            raise ArgumentError(f"there is no key {key!r:.100} with rows: call init_rows() first")
        return self._tables[key]
