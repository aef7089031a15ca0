"""A table of rows on the servers, as a worker sees it: rows are pushed and pulled by their numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.keyvalue.handle import Calls, finish_all
from tensorwire.keyvalue.key_arguments import Key, as_array, number
from tensorwire.launch.join_store import join_with
from tensorwire.launch.worker import Worker
from tensorwire.observe import counters
from tensorwire.store.admission import versions
from tensorwire.store.foreign import named_by
from tensorwire.store.modes import SSP, Async, Sync, check_reduce, settings_of
from tensorwire.store.request_client import pack_options
from tensorwire.store.request_link import RequestOperation
from tensorwire.store.row_client import RowClient
from tensorwire.store.row_layout import Array, TableSpec, merge
from tensorwire.store.row_rules import check_row_rule
from tensorwire.store.sharding import BUCKET_BYTES, PAGE, ParameterSpec
from tensorwire.store.store_layout import StoreSpec

INITIAL = ("zeros", "normal", "uniform")
_DTYPES = ("float32", "float64")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
_REQUEST_BYTES = 1 << 20
_BARRIER_SECONDS = 600.0


class Table:
    """Rows of ``shape[1:]``, numbered from 0 to ``shape[0] - 1``. All workers make it in the same place.

    ``options``: of the rule; ``settings``: what servers are told besides. ``values``: the first values, those of worker
    0; None: servers make them. ``calls``: what keeps threads apart.

    Raises `ArgumentError`, `Unsupported`, `PlanMismatch`, `WaitTimeout` or `JobEnded`.
    """

    def __init__(
        self,
        worker: Worker,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        *,
        mode: Sync | Async | SSP,
        rule: str,
        options: Mapping[str, Any],
        reduce: str,
        settings: TableSpec,
        values: Array | None = None,
        calls: Calls | None = None,
    ) -> None:
        self._worker, self.name, self.shape = worker, name, check_shape(shape)
        self.dtype = np.dtype(table_dtype(name, dtype))
        self.calls = Calls(worker) if calls is None else calls
        self._check(mode, rule, options, settings)
        self._group = {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}
        self._numeric = list(_numeric(self._group))
        self._options = self._packed(self._group)
        spec = StoreSpec(
            versions(rule),
            [ParameterSpec(name, self.shape, self.dtype.name)],
            rule,
            [self._group],
            self._numeric,
            max(PAGE, BUCKET_BYTES),
            False,
            reduce,
            mode_settings=settings_of(mode),
            table=settings,
            **named_by(rule, self._group),
        )
        self.client = join_with(worker, spec, RowClient, late=True)
        self.client.course = self.calls.course
        self._pulling: TablePull | None = None
        self._last: list[int] = []  # requests that the last push took
        self._finish = partial(finish_all, self.calls.lock, [self.client])
        worker.at_close(self._finish, owner=self)
        if worker.rank == 0 and not self.client.late:
            if values is not None:
                self.client.assign(np.arange(shape[0]), values, self._options)
            self.client.announce(RequestOperation.READY, self._options)

    def _check(self, mode: Sync | Async | SSP, rule: str, options: Mapping[str, Any], settings: TableSpec) -> None:
        """Refuses what cannot be served, before anything is agreed on."""
        if not isinstance(mode, (Sync, Async, SSP)):
            raise ArgumentError(f"rows need mode tw.store.Sync(), Async() or SSP(), not {mode!r:.100}")
        if getattr(mode, "damping", 0) or getattr(mode, "max_staleness", None) is not None:
            raise ArgumentError(f"tables do not support damping or max_staleness: omit them from {mode!r}")
        check_row_rule(rule, dict(options))
        kinds = (*_DTYPES, *_INTEGERS) if rule in ("sum", "assign") else _DTYPES
        if self.dtype.name not in kinds:
            raise Unsupported(f"{self.name!r} has dtype {self.dtype}; rows under {rule!r} hold {', '.join(kinds)}")
        if settings.initial not in INITIAL:
            raise ArgumentError(f"initial must be one of {', '.join(INITIAL)}, not {settings.initial!r:.100}")
        if settings.initial != "zeros" and self.dtype.name not in _DTYPES:
            raise ArgumentError(f"initial={settings.initial!r} is for float32 and float64, not for {self.dtype}")

    def _packed(self, group: Mapping[str, Any]) -> bytes:
        return pack_options([number(n, group[n] if i < 0 else group[n][i]) for _, n, i in self._numeric])

    def set_options(self, **options: float) -> None:
        """Changes numeric options of the rule for the pushes that follow. Raises `ArgumentError` for others."""
        known = {name for _, name, _ in self._numeric}
        changed = {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}
        for name, value in changed.items():
            if (
                name not in known
                or isinstance(value, (bool, str))
                or isinstance(value, list) is not isinstance(self._group[name], list)
            ):
                raise ArgumentError(f"{self.name!r} has no numeric option {name}={value!r:.100}")
        group = {**self._group, **changed}
        self._options, self._group = self._packed(group), group

    def indices(self, indices: Any) -> Array:
        """Numbers of rows as int64. Raises `ArgumentError` where one is not of a row."""
        found = as_array(indices)
        if found.dtype.kind not in "iu" and found.size:
            raise ArgumentError(f"numbers of rows are integers, not {found.dtype}")
        if found.size and not (int(found.min()) >= 0 and int(found.max()) < self.shape[0]):
            wrong = found[(found < 0) | (found >= self.shape[0])].flat[0]
            raise ArgumentError(f"{self.name!r} has rows 0 to {self.shape[0] - 1}, and no row {wrong}")
        return found.astype(np.int64, copy=False)

    def given(self, indices: Any, rows: Any) -> tuple[Array, Array]:
        """What is to be pushed: each number once, with the sum of its rows. Raises `ArgumentError`."""
        numbers, values = self.indices(indices), as_array(rows)
        if not numbers.size and not values.size:  # lists without elements
            values = np.empty((*numbers.shape, *self.shape[1:]), self.dtype)
        if values.dtype != self.dtype or values.shape != (*numbers.shape, *self.shape[1:]):
            raise ArgumentError(
                f"the rows for {self.name!r} must be {self.dtype}{[*numbers.shape, *self.shape[1:]]}, "
                f"not {values.dtype}{list(values.shape)}"
            )
        return merge(numbers.reshape(-1), values.reshape(numbers.size, *self.shape[1:]))

    def push(self, indices: Array, rows: Array) -> TablePush:
        """Pushes what `given` has checked."""
        with self.calls:
            self._last = self.client.push(indices, rows, self._options)
        return TablePush(self, self._last)

    def pull(self, indices: Any, out: Array | None = None) -> TablePull:
        """Begins to fetch the rows of these numbers, into ``out`` if there is one. Raises `ArgumentError`."""
        numbers = self.indices(indices)
        shape = (*numbers.shape, *self.shape[1:])
        if out is not None and (out.dtype != self.dtype or out.shape != shape or not out.flags.writeable):
            raise ArgumentError(f"out for {self.name!r} must be a writable {self.dtype}{list(shape)}")
        if self._pulling is not None:  # its memory is free when the one before has been taken
            self._pulling.finish(None)
        with self.calls:
            self._pulling = TablePull(self, numbers, out)
        return self._pulling

    def done(self, pull: TablePull) -> None:
        """``pull`` is finished."""
        if self._pulling is pull:
            self._pulling = None

    @property
    def options(self) -> bytes:
        """The option block in force."""
        return self._options

    def wait(self) -> None:
        """Returns when the last push has been applied. Raises `WaitTimeout` or `JobEnded`."""
        with self.calls:
            self.client.wait_applied(self._last or [0] * len(self.client.channels))

    def changes(self) -> Iterator[tuple[Array, Array]]:
        """Of a table that is followed: numbers and rows that changed since the last call."""
        with self.calls:
            yield from self.client.changes(self._options)

    def close(self) -> None:
        """This worker is done with it: when all are, servers have it no more. Idempotent."""
        self._finish()
        self._worker.not_at_close(self._finish)

    def idle(self) -> None:
        """This worker takes no part in rounds until all workers are idle. Raises `WaitTimeout` or `JobEnded`."""
        with self.calls:
            self.client.wait_applied(self.client.announce(RequestOperation.IDLE, self._options))

    def meet(self, value: str) -> str:
        """Returns worker 0's ``value`` when all workers have come. Raises `WaitTimeout` or `JobEnded`."""
        with self.calls:
            found: str = self._worker.collectives.broadcast(value, 0, _BARRIER_SECONDS)
            self._worker.collectives.barrier(_BARRIER_SECONDS)
            return found

    @property
    def rank(self) -> int:
        """This worker's."""
        return self._worker.rank

    def assign(self, values: Array) -> None:
        """Worker 0: sets all rows, while no other worker pushes."""
        with self.calls:
            self.client.assign(np.arange(self.shape[0]), values, self._options)


class TablePush:
    """A push that has begun."""

    def __init__(self, table: Table, numbers: Sequence[int]) -> None:
        self._table, self._numbers = table, numbers

    @property
    def applied(self) -> bool:
        """Whether it has been applied."""
        return self._table.client.applied(self._numbers)

    def wait_for_push(self, timeout: float | None) -> None:
        """Returns when it has been applied. Raises `WaitTimeout` or `JobEnded`."""
        self._table.client.wait_applied(self._numbers, timeout)


class TablePull:
    """A pull that has begun. ``result``: the rows, in the order and the shape of their numbers, once it is finished."""

    def __init__(self, table: Table, numbers: Array, out: Array | None) -> None:
        self._table, self._shape = table, numbers.shape
        flat = numbers.reshape(-1)
        self._inverse: Array | None = None
        if flat.size and not (flat[1:] > flat[:-1]).all():
            flat, inverse = np.unique(flat, return_inverse=True)
            self._inverse = inverse.reshape(-1)
        self._unique, self._finished, self.result = flat, False, out
        self._rows: Array | None = None  # what has come so far
        self._options = table.options
        table.client.ask(flat, self._options)

    @property
    def ready(self) -> bool:
        """Whether the answer has begun to come."""
        return self._finished or self._table.client.ready(self._unique)

    def wait_for_answer(self, timeout: float | None) -> None:
        """Returns when the first rows have come. Raises `WaitTimeout` or `JobEnded`."""
        if not self._finished:
            self._table.client.wait_ready(self._unique, timeout)

    def finish(self, timeout: float | None) -> None:
        """Waits for the rows, and takes them. Idempotent. Raises `WaitTimeout` or `JobEnded`."""
        if self._finished:
            return
        table, row = self._table, self._table.shape[1:]
        if self.result is None:
            self.result = np.empty((*self._shape, *row), table.dtype)
        flat = self.result.reshape(-1, *row) if self.result.flags.c_contiguous else None
        direct = self._inverse is None and flat is not None
        if self._rows is None:
            self._rows = flat if direct and flat is not None else np.empty((len(self._unique), *row), table.dtype)
        rows = self._rows
        with table.calls:
            table.client.take(self._unique, rows, self._options, timeout)
        if not direct:
            spread = rows if self._inverse is None else rows[self._inverse]
            np.copyto(self.result, spread.reshape(self.result.shape))
            counters.copied(self.result.nbytes)
        self._finished = True
        table.done(self)


def check_shape(shape: object) -> tuple[int, ...]:
    """The shape of a table. Raises `ArgumentError` for what none can have."""
    lengths = tuple(shape) if isinstance(shape, (tuple, list)) else ()
    whole = all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n > 0 for n in lengths)
    if not lengths or not whole or lengths[0] > 2**31 or math.prod(map(int, lengths)) >= 2**63:
        raise ArgumentError(f"a table has 1 to 2**31 rows of at least one element, not the shape {shape!r:.100}")
    return tuple(map(int, lengths))


def table_dtype(name: Key, dtype: object) -> str:
    """The name of a dtype. Raises `Unsupported` for what numpy has no dtype for."""
    try:
        if dtype is not None:
            return np.dtype(dtype).name  # type: ignore[call-overload,no-any-return]
    except TypeError:
        pass
    raise Unsupported(f"{name!r} has dtype {dtype!s:.100}; rows hold {', '.join((*_DTYPES, *_INTEGERS))}")


def check_embedding(sizes: Mapping[str, Any], reduce: str, scale: Any) -> None:
    """Refuses what no embedding can have, before it has a table. Raises `ArgumentError`."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name} must be a whole number of at least 1, not {value!r:.100}")
    check_reduce(reduce)
    check_scale(scale)


def check_scale(scale: Any) -> None:
    """Refuses what first values cannot be scaled by. Raises `ArgumentError`."""
    if not isinstance(scale, (int, float)) or not abs(scale) <= sys.float_info.max:
        raise ArgumentError(f"scale must be a number, not {scale!r:.100}")


def check_seed(seed: Any) -> None:
    """Refuses what first values cannot be drawn from. Raises `ArgumentError`."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ArgumentError(f"seed must be a whole number from 0 to 2**63 - 1, not {seed!r:.100}")


def embedding_table(
    worker: Worker,
    shape: tuple[int, int],
    dtype: str,
    *,
    drawn: int,
    seed: int | None,
    initial: str,
    scale: float,
    **options: Any,
) -> Table:
    """The table of an embedding. ``drawn``: worker 0's is the seed, if there is none. The rest is as for `Table`."""
    if seed is None:
        seed = worker.collectives.broadcast(drawn, 0, _BARRIER_SECONDS)
    check_seed(seed)
    settings = TableSpec(most_rows(shape, dtype), initial, float(scale), seed)
    return Table(worker, "embedding", shape, dtype, settings=settings, **options)


def most_rows(shape: tuple[int, ...], dtype: str) -> int:
    """How many rows one request has at most: those of a MiB. Raises `Unsupported` for a dtype that none can have."""
    row = math.prod(shape[1:]) * np.dtype(table_dtype("table", dtype)).itemsize
    return max(1, min(shape[0] if shape else 1, _REQUEST_BYTES // max(1, row)))


def _numeric(group: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """Where numbers are among options: those that each push carries."""
    for name, value in group.items():
        if isinstance(value, list) and all(isinstance(v, (int, float)) for v in value):
            yield from ((0, name, index) for index in range(len(value)))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield 0, name, -1
