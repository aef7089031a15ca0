"""What a worker and a server of a table of rows share: who has which rows, and the memory of requests and answers.

A table is divided over the servers at multiples of `BLOCK` rows. A *request* names rows of one server and what is
wanted of them; pushed rows lie in it, behind their numbers. Requests lie in a ring in the server's memory, each in a
place for at most ``most`` rows, of which only the rows that are there travel. An answer lies in the worker's memory,
in the same form. A worker has one answer at a time on its way from each server.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tensorwire.errors import ProtocolError
from tensorwire.sizes import round_up

Array = np.ndarray[Any, Any]
BLOCK = 1024  # rows: where tables are cut, and what is drawn from one seed
DEPTH = 4  # requests that a worker may be ahead of a server
WORD = 64  # bytes between signal words: each has its cache line
_ALIGN = 64
_HEAD = struct.Struct("<4sHHQIII4x")  # magic, version, operation, number, bytes of options, rows, whether more come
_MAGIC = b"TWRS"
_VERSION = 1


class TableSpec(msgspec.Struct, frozen=True):
    """What a `StoreSpec` says of a table beyond its shape.

    ``most``: rows of one request or answer. ``initial``: how servers make the first values: ``zeros``, ``normal`` or
    ``uniform``, with the deviation or the bound ``scale``, from ``seed``. ``followed``: every worker has all rows,
    and asks what has changed.
    """

    most: int
    initial: str = "zeros"
    scale: float = 1.0
    seed: int = 0
    followed: bool = False


class RowOperation(IntEnum):
    """What a worker asks of a server."""

    PUSH = 1  # contribute these rows; with the last part, the contribution is complete
    PULL = 2  # send these rows
    CHANGES = 3  # send rows that have changed since they were sent last
    ASSIGN = 4  # worker 0: these rows become the values
    READY = 5  # worker 0: all values are there, others may begin
    LOAD = 6  # worker 0: its state becomes the rule's
    FINISH = 7  # this worker is done
    IDLE = 8  # this worker takes no part in rounds until all are idle


WORKER_0 = (RowOperation.ASSIGN, RowOperation.READY, RowOperation.LOAD)  # what it alone may ask


class RowRequest(NamedTuple):
    """One request. ``indices``, within the server's part, and ``rows`` show the memory that it lies in."""

    operation: RowOperation
    number: int
    options: bytes
    more: bool
    indices: Array
    rows: Array | None


def divide(rows: int, servers: int) -> list[int]:
    """Where each server's part of a table begins, and after these where the last one ends."""
    share = -(-rows // servers)
    if share > BLOCK:
        share = round_up(share, BLOCK)
    return [min(rows, share * server) for server in range(servers)] + [rows]


class RowPlaces:
    """The form of requests and answers about rows of ``shape``, with an option block of ``options`` bytes."""

    def __init__(self, most: int, shape: tuple[int, ...], dtype: str, options: int) -> None:
        self._options, self._shape, self._dtype = options, shape, np.dtype(dtype)
        self.most = most
        self._row_bytes = int(np.prod(shape, dtype=np.int64)) * self._dtype.itemsize
        self._indices = round_up(_HEAD.size + options, _ALIGN)
        self.nbytes = round_up(self._rows_at(most) + most * self._row_bytes, _ALIGN)

    def _rows_at(self, count: int) -> int:
        return round_up(self._indices + 4 * count, _ALIGN)

    def indices(self, place: memoryview, count: int) -> Array:
        """Where the numbers of so many rows are, in a place."""
        return np.frombuffer(place, np.uint32, count, self._indices)

    def rows(self, place: memoryview, count: int) -> Array:
        """Where so many rows are, in a place."""
        elements = count * self._row_bytes // self._dtype.itemsize
        return np.frombuffer(place, self._dtype, elements, self._rows_at(count)).reshape(count, *self._shape)

    def pack(
        self, place: memoryview, operation: int, number: int, options: bytes, count: int, *, more: bool, full: bool
    ) -> int:
        """Writes the head. Returns how many bytes to send: with ``full``, those of the rows, too."""
        _HEAD.pack_into(place, 0, _MAGIC, _VERSION, operation, number, len(options), count, more)
        place[_HEAD.size : _HEAD.size + len(options)] = options
        return self._rows_at(count) + count * self._row_bytes if full else self._indices + 4 * count

    def unpack(self, place: memoryview, rows: int) -> RowRequest:
        """The request in a place, to a server with so many ``rows``. Raises `ProtocolError` for a malformed one."""
        magic, version, operation, number, length, count, more = _HEAD.unpack_from(place)
        known = operation in RowOperation._value2member_map_
        if magic != _MAGIC or version != _VERSION or length != self._options or count > self.most or not known:
            raise ProtocolError("a worker's request for rows is malformed")
        indices = self.indices(place, count)
        if count and int(indices.max()) >= rows:
            raise ProtocolError(f"a worker's request names row {int(indices.max())}, and there are {rows}")
        full = operation in (RowOperation.PUSH, RowOperation.ASSIGN)
        options = bytes(place[_HEAD.size : _HEAD.size + length])
        return RowRequest(
            RowOperation(operation), number, options, bool(more), indices, self.rows(place, count) if full else None
        )

    def answered(self, place: memoryview) -> tuple[int, bool]:
        """How many rows an answer has, and whether more are to come. Raises `ProtocolError`."""
        magic, version, _, _, _, count, more = _HEAD.unpack_from(place)
        if magic != _MAGIC or version != _VERSION or count > self.most:
            raise ProtocolError("a server's answer about rows is malformed")
        return count, bool(more)


def merge(indices: Array, rows: Array) -> tuple[Array, Array]:
    """Each number once, in ascending order, with the sum of its rows in the order in which they are given."""
    if not indices.size or (indices[1:] > indices[:-1]).all():
        return indices, rows
    # Numbers with their places below: no two are alike, so that the fastest sort keeps the order of rows.
    ordered = np.sort(indices.astype(np.int64) << 32 | np.arange(indices.size))
    order, numbers = ordered & 0xFFFFFFFF, ordered >> 32
    new = np.concatenate(([True], numbers[1:] != numbers[:-1]))
    first, group = np.flatnonzero(new), np.cumsum(new) - 1
    sums = rows[order[first]]
    times = np.arange(indices.size) - first[group]  # how often its number has come before
    again = np.flatnonzero(times)
    again = again[np.argsort(times[again], kind="stable")]
    cuts = np.flatnonzero(np.diff(times[again])) + 1
    for some in np.split(again, cuts) if again.size else ():  # all second ones, all third ones, and so on
        sums[group[some]] += rows[order[some]]
    return numbers[first], sums
