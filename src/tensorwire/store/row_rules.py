"""What a server does with the rows that are pushed to its part of a table: torch's own optimizers, row by row.

An optimizer gets a sparse gradient, and changes the rows that it names and their state, and nothing else.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tensorwire._native import add_rows
from tensorwire.errors import ArgumentError, ProtocolError, Unsupported
from tensorwire.store.array_functions import ArrayFunction, OptionsInForce, array_function, kept_items, like, load_item
from tensorwire.store.row_layout import BLOCK, Array, TableSpec
from tensorwire.store.rule_names import is_foreign
from tensorwire.store.state_transfer import Entry, Item
from tensorwire.store.store_layout import StoreSpec

ROW_OPTIMIZERS = ("Adagrad", "SGD", "SparseAdam")
ROW_RULES = ("sum", "assign", *ROW_OPTIMIZERS)
_MOVES_ALL = ("momentum", "weight_decay")  # options that change rows without a gradient


def check_row_rule(rule: str, options: dict[str, Any]) -> None:
    """Refuses what is no rule for rows. Raises `ArgumentError`."""
    if rule not in ROW_RULES and not is_foreign(rule):
        names = ", ".join(ROW_RULES)
        raise ArgumentError(f"there is no rule {rule!r} for rows; there are: {names}, and functions of arrays")
    for name in _MOVES_ALL:
        if rule in ROW_OPTIMIZERS and options.get(name):
            raise ArgumentError(f"{rule} with {name}={options[name]!r} changes all rows in every step: leave {name} 0")


def make_row_rule(spec: StoreSpec, first: int, values: Array) -> RowRule:
    """The rule for ``values``, whose first row is number ``first`` of the table."""
    if function := array_function(spec):
        return _FunctionRows(function, spec, first, values)
    if is_foreign(spec.rule):
        raise Unsupported(
            f"rows take functions of numpy arrays, with an attribute numpy = True, and {spec.rule} is none"
        )
    kind = _OptimizerRows if spec.rule in ROW_OPTIMIZERS else RowRule
    return kind(spec, first, values)


def draw(table: TableSpec, values: Array, first: int) -> None:
    """The first values of rows from ``first`` on. A row has the same ones on any number of servers."""
    if table.initial == "zeros":
        values[:] = 0
        return
    for at in range(0, len(values), BLOCK):
        block, skipped = divmod(first + at, BLOCK)
        part = values[at : at + BLOCK]
        while len(part):
            generator = np.random.default_rng((table.seed, block))
            shape = (BLOCK, *values.shape[1:])
            drawn = generator.standard_normal(shape) if table.initial == "normal" else generator.uniform(-1, 1, shape)
            here = min(BLOCK - skipped, len(part))
            part[:here] = drawn[skipped : skipped + here] * table.scale
            part, block, skipped = part[here:], block + 1, 0


class RowRule:
    """The rules ``sum`` and ``assign``, which keep nothing beside the values."""

    def __init__(self, spec: StoreSpec, first: int, values: Array) -> None:
        self.spec, self.first, self.values = spec, first, values

    def update(self, indices: Array, rows: Array, options: bytes) -> None:
        """Changes the rows of these numbers, each of which comes once, in ascending order."""
        if self.spec.rule != "sum":
            self.values[indices] = rows
        elif self.values.dtype.kind == "f":
            wide = self.values.itemsize == 8
            add_rows(self.values, indices.astype(np.uint32), rows, self.values[0].nbytes, wide)
        else:
            self.values[indices] += rows

    def state(self) -> Iterator[Iterable[Item]]:
        """Nothing."""
        return iter(())

    def load_state(self, items: Iterable[Item]) -> None:
        """As `Stateful`."""
        for entry, _ in items:
            raise ProtocolError(f"this rule keeps nothing, and worker 0 loads {entry}")


class _FunctionRows(RowRule):
    """A function of arrays: it is given the rows that are pushed, and what is kept for them, as if they were all."""

    def __init__(self, function: ArrayFunction, spec: StoreSpec, first: int, values: Array) -> None:
        super().__init__(spec, first, values)
        self._function, self._in_force = function, OptionsInForce(spec)
        self._numbers: dict[str, Any] = {}  # what it keeps for all rows
        self._rows: dict[str, Array] = {}  # and for each

    def update(self, indices: Array, rows: Array, options: bytes) -> None:
        """As `RowRule`."""
        parameter = self.values[indices]
        state = {**self._numbers, **{key: kept[indices] for key, kept in self._rows.items()}}
        self._function(parameter, rows, state, self._in_force.of(options))
        self.values[indices] = parameter
        for key, value in state.items():
            array = np.asarray(value) if hasattr(value, "__array__") else None
            if key not in self._rows and (array is None or not array.ndim):
                self._numbers[key] = value
            else:
                self._keep(key, array, indices, options)

    def _keep(self, key: str, value: Array | None, indices: Array, options: bytes) -> None:
        """What is kept for rows becomes ``value``, which has one row for each. Raises `Unsupported` for others."""
        kept = self._rows.get(key)
        of_a_row = kept.shape[1:] if kept is not None else value.shape[1:] if value is not None else ()
        if value is None or value.shape != (*indices.shape, *of_a_row):
            found = "what is no array" if value is None else f"an array of the shape {list(value.shape)}"
            raise Unsupported(
                f"{self.spec.rule} keeps {found} as {key!r} after a push of {len(indices)} rows: a rule for rows "
                "keeps numbers, and arrays with one row, of the same shape every time, for each row that was pushed"
            )
        if kept is None:
            self._numbers.pop(key, None)
            kept = np.full((len(self.values), *of_a_row), self._initial(key, options), value.dtype)
            self._rows[key] = kept
        kept[indices] = value

    def _initial(self, key: str, options: bytes) -> float:
        """What is kept for each element of a row that was not pushed yet."""
        initial = getattr(self._function, "initial", None)
        return float(initial(self._in_force.of(options)).get(key, 0.0)) if initial else 0.0

    def state(self) -> Iterator[Iterable[Item]]:
        """What the function keeps."""
        yield kept_items(0, self._numbers, self.values)
        for start in range(0, len(self.values), BLOCK):
            yield itertools.chain.from_iterable(self._block(key, kept, start) for key, kept in self._rows.items())

    def _block(self, key: str, kept: Array, start: int) -> Iterator[Item]:
        shape = (self.spec.tensors[0].shape[0], *kept.shape[1:])
        block = kept[start : start + BLOCK]
        return kept_items(0, {key: block}, block, (self.first + start) * math.prod(kept.shape[1:]), shape)

    def load_state(self, items: Iterable[Item]) -> None:
        """As `Stateful`."""
        self._numbers, self._rows = {}, {}
        for entry, data in items:
            if not entry.rows:
                load_item(self._numbers, entry, data)
                continue
            shape = (len(self.values), *entry.shape[1:])
            array = self._rows.setdefault(entry.key, np.zeros(shape, entry.dtype))
            start = entry.start - self.first * math.prod(entry.shape[1:])
            array.reshape(-1)[start : start + entry.stop - entry.start] = np.frombuffer(data, entry.dtype)


class _OptimizerRows(RowRule):
    """One of torch's optimizers that take sparse gradients."""

    def __init__(self, spec: StoreSpec, first: int, values: Array) -> None:
        super().__init__(spec, first, values)
        import torch  # `sum` and `assign` do without

        self._torch = torch
        torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call] # its optimizers warn
        self._parameter = torch.nn.Parameter(torch.from_numpy(values))
        try:
            cls: Any = getattr(torch.optim, spec.rule)
            self._optimizer: torch.optim.Optimizer = cls([self._parameter], **self._options())
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"the optimizer {spec.rule} refuses its options: {error}") from None
        self._in_force = b""

    def _options(self) -> dict[str, Any]:
        listed = self.spec.groups[0].items()
        return {name: tuple(value) if isinstance(value, list) else value for name, value in listed}

    def update(self, indices: Array, rows: Array, options: bytes) -> None:
        """As `RowRule`."""
        torch = self._torch
        if options != self._in_force:
            self._set(options)
        numbers = torch.from_numpy(indices.astype(np.int64)[None])
        self._parameter.grad = torch.sparse_coo_tensor(
            numbers, torch.from_numpy(rows), self._parameter.shape, is_coalesced=True
        )
        self._optimizer.step()

    def _set(self, options: bytes) -> None:
        """The numbers of an option block are in force from now on."""
        self._in_force = options
        group, given = self._optimizer.param_groups[0], self.spec.groups[0]
        for (_, name, index), value in zip(
            self.spec.numeric, struct.unpack(f"<{len(options) // 8}d", options), strict=True
        ):
            if index < 0:
                group[name] = like(given[name], value)
            else:
                group[name] = (*group[name][:index], value, *group[name][index + 1 :])

    def state(self) -> Iterator[Iterable[Item]]:
        """What the optimizer keeps, by its names: numbers such as a count of steps, and rows."""
        rows: dict[str, Array] = {}
        numbers: dict[str, Any] = {}
        for key, value in self._optimizer.state.get(self._parameter, {}).items():
            if isinstance(value, self._torch.Tensor) and value.shape == self._parameter.shape:
                rows[key] = value.numpy()
            else:
                numbers[key] = float(value)
        yield kept_items(0, numbers, self.values)
        for start in range(0, len(self.values), BLOCK):
            yield [self._block(key, kept, start) for key, kept in rows.items()]

    def _block(self, key: str, kept: Array, start: int) -> Item:
        shape, width = (self.spec.tensors[0].shape[0], *kept.shape[1:]), math.prod(kept.shape[1:])
        block, at = kept[start : start + BLOCK].reshape(-1), (self.first + start) * width
        return Entry(0, key, kept.dtype.name, shape, True, at, at + block.size), block.view(np.uint8).data

    def load_state(self, items: Iterable[Item]) -> None:
        """As `Stateful`."""
        torch = self._torch
        state: dict[str, Any] = {}
        width = math.prod(self.values.shape[1:])
        for entry, data in items:
            if not entry.rows:
                number = float(np.frombuffer(data, np.float64)[0])
                state[entry.key] = torch.tensor(number) if self.spec.rule == "Adagrad" else int(number)
                continue
            if entry.shape[1:] != self.values.shape[1:]:
                raise ProtocolError(f"worker 0 loads {entry}, which is not of this table")
            if entry.key not in state:
                state[entry.key] = torch.zeros(self._parameter.shape, dtype=getattr(torch, entry.dtype))
            start = entry.start - self.first * width
            flat = state[entry.key].numpy().reshape(-1)
            flat[start : start + entry.stop - entry.start] = np.frombuffer(data, entry.dtype)
        self._optimizer.state[self._parameter] = state
