"""What a worker and a server of a table of rows share: who has which rows, and the memory of requests and answers.

A table is divided over the servers at multiples of `BLOCK` rows. A request has two numbers: how many rows it is about,
and whether more follow. The rows' own numbers, and the rows that are pushed, lie in the next of `DEPTH` places in the
server's memory, each for at most ``most`` rows, of which only those that are there travel. A word in the worker's
memory, *done*, says how many requests for the table the server has done. An answer lies in the worker's memory, in one
of `ANSWERS` such places: no more are on their way from a server, so that it fills one while the other is read.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ProtocolError
from tensorwire.sizes import round_up
from tensorwire.store.request_link import Request, RequestOperation
from tensorwire.store.sharding import Bucket, ParameterSpec, Piece, StorePlan, check_plan

Array = np.ndarray[Any, Any]
BLOCK = 1024  # rows: where tables are cut, and what is drawn from one seed
DEPTH = 4  # requests for a table that a worker may be ahead of a server
ANSWERS = 2  # places for answers of a server in a worker's memory
LEAST_PART = 128 << 10  # bytes of rows: of fewer, the second request takes longer than it saves
CARRYING = (RequestOperation.PUSH, RequestOperation.ASSIGN)
_ALIGN = 64
_ANSWER = struct.Struct("<II")  # before an answer: rows, and whether more follow


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


class RowRequest(NamedTuple):
    """The ``number``-th request for a table. ``indices``, within the server's part, and ``rows`` show its memory."""

    operation: RequestOperation
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


def plan_rows(table: ParameterSpec, servers: int, bucket_bytes: int) -> StorePlan:
    """The plan of a table: each server has the rows that `divide` gives it, and a bucket has whole rows.

    Raises as `make_plan`.
    """
    check_plan([table], servers, servers, bucket_bytes)
    starts = divide(table.shape[0], servers)
    elements = table.elements // table.shape[0]
    row = elements * DTYPES[table.dtype]
    most = rows_of_bucket(row, bucket_bytes)
    buckets: list[list[Bucket]] = []
    count = 0
    for server, (start, end) in enumerate(pairwise(starts)):
        mine = []
        for index, first in enumerate(range(start, end, most)):
            stop = min(first + most, end)
            piece = Piece(0, first * elements, stop * elements, 0)
            nbytes = (stop - first) * row
            mine.append(Bucket(count, server, server, index, first * row, (first - start) * row, nbytes, (piece,)))
            count += 1
        buckets.append(mine)
    shards = tuple((end - start) * row for start, end in pairwise(starts))
    return StorePlan(servers, (table,), (0,), table.nbytes, shards, tuple(map(tuple, buckets)))


def rows_of_bucket(row_bytes: int, bucket_bytes: int) -> int:
    """How many rows a bucket of a table has."""
    return max(1, bucket_bytes // row_bytes)


class RowPlaces:
    """The form of places for rows of ``shape``: a head of an answer, numbers of rows, rows."""

    def __init__(self, most: int, shape: tuple[int, ...], dtype: str) -> None:
        self._shape, self._dtype = shape, np.dtype(dtype)
        self.most = most
        self._row_bytes = int(np.prod(shape, dtype=np.int64)) * self._dtype.itemsize
        self.nbytes = round_up(self._rows_at(most) + most * self._row_bytes, _ALIGN)

    def _rows_at(self, count: int) -> int:
        return round_up(_ALIGN + 4 * count, _ALIGN)

    def indices(self, place: memoryview, count: int) -> Array:
        """Where the numbers of so many rows are, in a place."""
        return np.frombuffer(place, np.uint32, count, _ALIGN)

    def rows(self, place: memoryview, count: int) -> Array:
        """Where so many rows are, in a place."""
        elements = count * self._row_bytes // self._dtype.itemsize
        return np.frombuffer(place, self._dtype, elements, self._rows_at(count)).reshape(count, *self._shape)

    def part(self, count: int) -> int:
        """How many of so many rows to ask for at once."""
        return min(self.most, max(-(-count // ANSWERS), LEAST_PART // self._row_bytes, 1))

    def size(self, count: int, *, full: bool) -> int:
        """How many bytes of a place travel: with ``full``, those of the rows, too."""
        return self._rows_at(count) + count * self._row_bytes if full else _ALIGN + 4 * count

    def request(self, place: memoryview, request: Request, number: int, rows: int) -> RowRequest:
        """The request to a server with so many ``rows``. Raises `ProtocolError` for a malformed one."""
        if len(request.numbers) != 2 or request.numbers[0] > self.most:
            raise ProtocolError("a worker's request for rows is malformed")
        count, more = request.numbers
        indices = self.indices(place, count)
        if count and int(indices.max()) >= rows:
            raise ProtocolError(f"a worker's request names row {int(indices.max())}, and there are {rows}")
        pushed = self.rows(place, count) if request.operation in CARRYING else None
        return RowRequest(request.operation, number, request.options, bool(more), indices, pushed)

    def head(self, place: memoryview, count: int, more: bool) -> None:
        """Writes the head of an answer."""
        _ANSWER.pack_into(place, 0, count, more)

    def answered(self, place: memoryview) -> tuple[int, bool]:
        """How many rows an answer has, and whether more are to come. Raises `ProtocolError`."""
        count, more = _ANSWER.unpack_from(place)
        if count > self.most:
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
