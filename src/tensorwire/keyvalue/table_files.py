"""A table of rows as a folder: an array in numpy's npy format for its values and for each thing that its rule keeps.

Arrays are written and read block by block, so that no worker has to hold the table.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tensorwire.errors import ArgumentError
from tensorwire.keyvalue.row_table import Table
from tensorwire.store.client_state import fetch_state, send_state
from tensorwire.store.row_layout import Array, RowOperation
from tensorwire.store.state_transfer import NUMBER, Entry, Item

_INDEX, _VALUES = "index.json", "values"
_VERSION = 1
_BLOCK = 1 << 14  # rows


class _TableIndex(msgspec.Struct, frozen=True):
    version: int
    rule: str
    arrays: list[str]  # what the rule keeps beside the values
    numbers: dict[str, float]


def save_table(table: Table, folder: str | os.PathLike[str]) -> None:
    """Writes a folder, which replaces one of an earlier call as a whole. Raises `ArgumentError` where it cannot."""
    target = Path(folder)
    if target.exists() and not (target / _INDEX).exists():
        raise ArgumentError(f"{target} exists, and is no folder of a table: choose another one")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _write(table, partial)
        if target.exists():
            shutil.rmtree(target)
        partial.replace(target)
    except OSError as error:
        raise ArgumentError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(table: Table, folder: Path) -> None:
    values = _open(folder, _VALUES, table.shape, table.dtype)
    for block in _blocks(table):
        pull = table.pull(block)
        pull.finish(None)
        values[block[0] : block[-1] + 1] = pull.result
    arrays: dict[str, Any] = {}
    numbers: dict[str, float] = {}
    with table.calls:
        for entry, data in fetch_state(table.client):
            if not entry.rows:
                numbers[entry.key] = float(np.frombuffer(data, entry.dtype)[0])
                continue
            if entry.key not in arrays:
                arrays[entry.key] = _open(folder, entry.key, entry.shape, np.dtype(entry.dtype))
            arrays[entry.key].reshape(-1)[entry.start : entry.stop] = np.frombuffer(data, entry.dtype)
    for array in (values, *arrays.values()):
        array.flush()
    index = _TableIndex(_VERSION, table.client.spec.rule, sorted(arrays), numbers)
    (folder / _INDEX).write_bytes(msgspec.json.encode(index))


def _open(folder: Path, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    return np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, shape)


def _blocks(table: Table) -> Iterator[Array]:
    for start in range(0, table.shape[0], _BLOCK):
        yield np.arange(start, min(table.shape[0], start + _BLOCK))


def check_folder(table: Table, folder: str | os.PathLike[str]) -> str:
    """What is wrong with a folder for this table; empty if nothing is."""
    try:
        index, values, _ = _read(folder)
    except ArgumentError as error:
        return str(error)
    if index.rule != table.client.spec.rule:
        return f"{folder} is of the rule {index.rule!r}, and {table.name!r} has {table.client.spec.rule!r}"
    if values.shape != table.shape or values.dtype != table.dtype:
        return (
            f"{folder} has {values.dtype}{list(values.shape)}, and {table.name!r} is {table.dtype}{list(table.shape)}"
        )
    return ""


def _read(folder: str | os.PathLike[str]) -> tuple[_TableIndex, Array, dict[str, Array]]:
    """The index and the arrays, mapped. Raises `ArgumentError` for anything but what `save_table` wrote."""
    path = Path(folder)
    try:
        index = msgspec.json.decode((path / _INDEX).read_bytes(), type=_TableIndex)
        if index.version != _VERSION:
            raise ArgumentError(f"{path} has version {index.version} of the format; this Tensorwire reads {_VERSION}")
        names = [_VALUES, *(Path(name).name for name in index.arrays)]
        found = {name: np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, EOFError, msgspec.MsgspecError) as error:
        raise ArgumentError(f"{path} is damaged, or no folder of a table: {error}") from None
    values = found.pop(_VALUES)
    return index, values, found


def load_on_all(table: Table, folder: str | os.PathLike[str]) -> None:
    """Every worker calls it; worker 0 reads the folder. Raises `ArgumentError` on all of them, if it does not fit."""
    with table.calls:
        table.wait()
        table.meet("")  # nobody's push is under way
        wrong = table.meet(check_folder(table, folder) if table.rank == 0 else "")
        if wrong:
            raise ArgumentError(wrong)
        if table.rank == 0:
            _load(table, folder)
        table.meet("")


def _load(table: Table, folder: str | os.PathLike[str]) -> None:
    """Sets the values and what the rule keeps, while no other worker sends anything."""
    index, values, arrays = _read(folder)
    client = table.client
    for block in _blocks(table):
        client.assign(block, np.ascontiguousarray(values[block[0] : block[-1] + 1]), table.options)
    if index.numbers or arrays:
        set_state(table, index.numbers, arrays)


def set_state(table: Table, numbers: Mapping[str, float], arrays: Mapping[str, Array]) -> None:
    """Worker 0: what the rule keeps becomes this. Raises `WaitTimeout` or `JobEnded`."""
    client = table.client
    requests = client.announce(RowOperation.LOAD, table.options)
    send_state(client, requests, lambda server: _items(table, numbers, arrays, server))
    client.wait_applied(requests)


def _items(table: Table, numbers: Mapping[str, float], arrays: Mapping[str, Array], server: int) -> Iterator[Item]:
    """A server's share: its rows, block by block, and all numbers."""
    for name, number in numbers.items():
        yield Entry(0, name, "float64", (1,), False, 0, 1, NUMBER), np.array([number]).view(np.uint8).data
    first, end = table.client.starts[server : server + 2]
    for name, array in arrays.items():
        width = array.size // len(array)
        for start in range(first, end, _BLOCK):
            rows = np.ascontiguousarray(array[start : min(end, start + _BLOCK)]).reshape(-1)
            entry = Entry(0, name, array.dtype.name, array.shape, True, start * width, start * width + rows.size)
            yield entry, rows.view(np.uint8).data
