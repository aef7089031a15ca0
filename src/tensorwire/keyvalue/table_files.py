"""A table of rows as a folder: one file in numpy's npy format for its values, and one for each part of its state.

Arrays are written and read block by block, so no worker has to hold the table.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tensorwire.errors import ArgumentError, TensorwireError
from tensorwire.keyvalue.row_table import Table
from tensorwire.keyvalue.table_folder import INDEX, VALUES, TableIndex, folder_to_read, read_index, replace_folder
from tensorwire.store.client_state import fetch_state, send_state
from tensorwire.store.kept import KeptArray, cut, join, outline_of
from tensorwire.store.kept_check import check_kept
from tensorwire.store.key_files import reason
from tensorwire.store.request_link import RequestOperation
from tensorwire.store.row_layout import Array
from tensorwire.store.sharding import Piece
from tensorwire.store.state_transfer import NUMBER, Entry

_BLOCK = 1 << 14  # rows


def save_table(table: Table, folder: str | os.PathLike[str]) -> None:
    """Writes a folder, which replaces one of an earlier call as a whole. Raises `ArgumentError` where it cannot."""
    replace_folder(folder, lambda new: _write(table, new))


def _write(table: Table, folder: Path) -> None:
    values = _open(folder / VALUES, table.shape, table.dtype)
    for block in _blocks(table):
        pull = table.pull(block)
        pull.finish(None)
        values[block[0] : block[-1] + 1] = pull.result
    index = TableIndex(table.client.spec.rule, [], {})
    arrays: dict[str, Any] = {}

    def room(entry: Entry) -> memoryview | None:
        if not entry.rows:
            return None
        arrays[entry.key] = _open(folder / index.file(entry.key), entry.shape, np.dtype(entry.dtype))
        return outline_of(arrays[entry.key])[2]

    with table.calls:
        for entry, data in join(fetch_state(table.client), room).values():
            if not entry.rows:
                index.numbers[entry.key] = float(np.frombuffer(data, entry.dtype)[0])
    for array in (values, *arrays.values()):
        array.flush()
    index.arrays.extend(sorted(arrays))
    (folder / INDEX).write_bytes(index.encoded())


def _open(file: Path, shape: tuple[int, ...], dtype: Any) -> Any:
    return np.lib.format.open_memmap(file, "w+", dtype, shape)


def _blocks(table: Table) -> Iterator[Array]:
    for start in range(0, table.shape[0], _BLOCK):
        yield np.arange(start, min(table.shape[0], start + _BLOCK))


def check_folder(table: Table, folder: str | os.PathLike[str]) -> str:
    """What is wrong with a folder for this table; empty if nothing is."""
    try:
        index, values, arrays = read_folder(folder)
        spec = table.client.spec
        if index.rule != spec.rule:
            return f"{folder} is of the rule {index.rule!r}, and {table.name!r} has {spec.rule!r}"
        if values.shape != table.shape or values.dtype != table.dtype:
            wanted = f"{table.dtype}{list(table.shape)}"
            return f"{folder} has {values.dtype}{list(values.shape)}, and {table.name!r} is {wanted}"
        check_kept(spec, table.options, _kept(index.numbers, arrays))
    except TensorwireError as error:
        return str(error) if str(folder) in str(error) else f"{folder} does not fit: {error}"
    return ""


def read_folder(folder: str | os.PathLike[str]) -> tuple[TableIndex, Array, dict[str, Array]]:
    """The index and the arrays, mapped. Raises `ArgumentError` for anything but what `save_table` wrote."""
    try:
        path = folder_to_read(folder)
        index = read_index(path)
        names = {name: index.file(name) for name in index.arrays}
        if len(names) < len(index.arrays):
            raise ArgumentError(f"{path} has an array twice")
        found = {n: np.load(path / f, mmap_mode="r", allow_pickle=False) for n, f in names.items()}
        return index, np.load(path / VALUES, mmap_mode="r", allow_pickle=False), found
    except ArgumentError:
        raise
    except OSError as error:
        raise ArgumentError(f"cannot read {folder}: {error.strerror or error}") from None
    except Exception as error:  # numpy has many for a damaged file
        raise ArgumentError(f"{folder} is damaged, or no folder of a table: {reason(error)}") from None


def load_on_all(table: Table, folder: str | os.PathLike[str]) -> None:
    """Every worker calls it; worker 0 reads the folder. Raises `ArgumentError` on all of them, if it does not fit."""
    with table.calls:
        table.wait()
        table.meet("")  # nobody's push is under way
        wrong = table.meet(check_folder(table, folder) if table.rank == 0 else "")
        if wrong:
            raise ArgumentError(wrong)
        if table.rank == 0:
            with table.client.course.unit("loading rows"):
                _load(table, folder)
        table.meet("")


def _load(table: Table, folder: str | os.PathLike[str]) -> None:
    """Sets the values and what the rule keeps, while no other worker sends anything."""
    index, values, arrays = read_folder(folder)
    client = table.client
    for block in _blocks(table):
        client.assign(block, np.ascontiguousarray(values[block[0] : block[-1] + 1]), table.options)
    if index.numbers or arrays:
        set_state(table, index.numbers, arrays)


def set_state(table: Table, numbers: Mapping[str, float], arrays: Mapping[str, Array]) -> None:
    """Worker 0: what the rule keeps becomes this. Raises `WaitTimeout` or `JobEnded`."""
    client, tensors = table.client, table.client.spec.tensors
    row = tensors[0].elements // tensors[0].shape[0]
    pieces = [Piece(0, first * row, end * row, 0) for first, end in itertools.pairwise(client.starts)]
    requests = client.announce(RequestOperation.LOAD, table.options)
    whole = [each.item for each in _kept(numbers, arrays)]
    send_state(client, requests, lambda server: cut(whole, tensors, pieces[server : server + 1]))
    client.wait_applied(requests)


def _kept(numbers: Mapping[str, float], arrays: Mapping[str, Array]) -> list[KeptArray]:
    """What the rule keeps, as `check_kept` and `cut` take it."""
    kept = [KeptArray(0, name, "", True, array) for name, array in arrays.items()]
    return kept + [KeptArray(0, name, NUMBER, False, np.array([number])) for name, number in numbers.items()]
