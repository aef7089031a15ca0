"""What a server does with the rows that are pushed to its part of a table: torch's own optimizers, row by row.

An optimizer gets a sparse gradient, and changes the rows that it names and their state, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tensorwire._native import add_rows
from tensorwire.errors import ArgumentError, ProtocolError, Unsupported
from tensorwire.store.arithmetic import NAMED, ArrayFunction
from tensorwire.store.find_rule import array_function, rule_of
from tensorwire.store.kept import Held, load_held, outline, value_of
from tensorwire.store.row_layout import BLOCK, Array, TableSpec
from tensorwire.store.rule_names import ASSIGN, SUM, is_foreign
from tensorwire.store.rule_options import OptionsInForce, numbers_in, set_option, tuples
from tensorwire.store.sharding import Piece
from tensorwire.store.state_transfer import Item
from tensorwire.store.store_layout import StoreSpec

ROW_OPTIMIZERS = ("Adagrad", "SGD", "SparseAdam")
ROW_RULES = (SUM, ASSIGN, *ROW_OPTIMIZERS)
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
    if spec.rule in NAMED:
        return RowRule(spec, first, values)
    if function := array_function(spec):
        return _FunctionRows(function, spec, first, values)
    if is_foreign(spec.rule):
        raise Unsupported(
            f"rows take functions of numpy arrays, with an attribute numpy = True, and {spec.rule} is none"
        )
    return _OptimizerRows(spec, first, values)


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
    """The rules ``sum`` and ``assign``, which keep nothing beside the values; others keep numbers, and rows.

    Attributes:
        numbers: What is kept for all rows together, by key.
        rows: What is kept for each row: arrays with as many rows as the values, by key.
    """

    def __init__(self, spec: StoreSpec, first: int, values: Array) -> None:
        self.spec, self.values = spec, values
        self.numbers: dict[str, Any] = {}
        self.rows: dict[str, Array] = {}
        self._first = first
        self._held = self._holding(0, len(values))

    def _holding(self, start: int, stop: int) -> Held:
        """Rows ``start`` to ``stop`` of the values."""
        row, shape = math.prod(self.values.shape[1:]), (stop - start, *self.values.shape[1:])
        piece = Piece(0, (self._first + start) * row, (self._first + stop) * row, 0)
        return Held(piece, self.spec.tensors[0], shape)

    def update(self, indices: Array, rows: Array, options: bytes) -> None:
        """Changes the rows of these numbers, each of which comes once, in ascending order."""
        if self.spec.rule != SUM:
            self.values[indices] = rows
        elif self.values.dtype.kind == "f":
            wide = self.values.itemsize == 8
            add_rows(self.values, indices.astype(np.uint32), rows, self.values[0].nbytes, wide)
        else:
            self.values[indices] += rows

    def state(self) -> Iterator[Iterable[Item]]:
        """What is kept, some rows at a time."""
        yield self._held.items(self.numbers, outline, rows=False)
        for start in range(0, len(self.values), BLOCK):
            block = {key: kept[start : start + BLOCK] for key, kept in self.rows.items()}
            held = self._holding(start, min(start + BLOCK, len(self.values)))
            yield held.items(block, outline, rows=True)

    def load_state(self, items: Iterable[Item]) -> None:
        """As `Stateful`."""
        (found,) = load_held([self._held], items)
        values = {key: (entry.rows, value_of(entry, data)) for key, (entry, data) in found.items()}
        self.keep(
            {key: value for key, (rows, value) in values.items() if not rows},
            {key: value for key, (rows, value) in values.items() if rows},
        )

    def keep(self, numbers: dict[str, Any], rows: dict[str, Array]) -> None:
        """What is kept becomes this. Raises `ProtocolError`."""
        if numbers or rows:
            raise ProtocolError(f"this rule keeps nothing, and worker 0 loads {[*numbers, *rows]}")


class _FunctionRows(RowRule):
    """A function of arrays: it is given the rows that are pushed, and what is kept for them, as if they were all."""

    def __init__(self, function: ArrayFunction, spec: StoreSpec, first: int, values: Array) -> None:
        super().__init__(spec, first, values)
        self._function, self._in_force = function, OptionsInForce(spec)

    def update(self, indices: Array, rows: Array, options: bytes) -> None:
        """As `RowRule`."""
        parameter = self.values[indices]
        state = {**self.numbers, **{key: kept[indices] for key, kept in self.rows.items()}}
        self._function(parameter, rows, state, self._in_force.of(options))
        self.values[indices] = parameter
        for key, value in state.items():
            array = np.asarray(value) if hasattr(value, "__array__") else None
            if key not in self.rows and (array is None or not array.ndim):
                self.numbers[key] = value
            else:
                self._keep(key, array, indices, options)

    def _keep(self, key: str, value: Array | None, indices: Array, options: bytes) -> None:
        """What is kept for rows becomes ``value``, which has one row for each. Raises `Unsupported` for others."""
        kept = self.rows.get(key)
        of_a_row = kept.shape[1:] if kept is not None else value.shape[1:] if value is not None else ()
        if value is None or value.shape != (*indices.shape, *of_a_row):
            found = "what is no array" if value is None else f"an array of the shape {list(value.shape)}"
            raise Unsupported(
                f"{self.spec.rule} keeps {found} as {key!r} after a push of {len(indices)} rows: a rule for rows "
                "keeps numbers, and arrays with one row, of the same shape every time, for each row that was pushed"
            )
        if kept is None:
            self.numbers.pop(key, None)
            kept = np.full((len(self.values), *of_a_row), self._initial(key, options), value.dtype)
            self.rows[key] = kept
        kept[indices] = value

    def _initial(self, key: str, options: bytes) -> float:
        """What is kept for each element of a row that was not pushed yet."""
        initial = getattr(self._function, "initial", None)
        return float(initial(self._in_force.of(options)).get(key, 0.0)) if initial else 0.0

    def keep(self, numbers: dict[str, Any], rows: dict[str, Array]) -> None:
        """As `RowRule`."""
        self.numbers, self.rows = numbers, rows


class _OptimizerRows(RowRule):
    """One of torch's optimizers that take sparse gradients."""

    def __init__(self, spec: StoreSpec, first: int, values: Array) -> None:
        super().__init__(spec, first, values)
        import torch  # `sum` and `assign` do without

        self._torch = torch
        torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call] # its optimizers warn
        self._parameter = torch.nn.Parameter(torch.from_numpy(values))
        try:
            cls = rule_of(spec, ROW_OPTIMIZERS)
            options = {name: tuples(value) for name, value in spec.groups[0].items()}
            self._optimizer: torch.optim.Optimizer = cls([self._parameter], **options)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"the optimizer {spec.rule} refuses its options: {error}") from None
        self._in_force = b""
        self._sort()

    def update(self, indices: Array, rows: Array, options: bytes) -> None:
        """As `RowRule`."""
        torch = self._torch
        if options != self._in_force:
            self._in_force = options
            group, given = self._optimizer.param_groups[0], self.spec.groups[0]
            for (_, name, index), value in zip(self.spec.numeric, numbers_in(options), strict=True):
                set_option(group, given[name], name, index, value)
        numbers = torch.from_numpy(indices.astype(np.int64)[None])
        self._parameter.grad = torch.sparse_coo_tensor(
            numbers, torch.from_numpy(rows), self._parameter.shape, is_coalesced=True
        )
        self._optimizer.step()
        self._sort()

    def _sort(self) -> None:
        """What the optimizer keeps, by its names: numbers such as a count of steps, and rows."""
        for key, value in self._optimizer.state.get(self._parameter, {}).items():
            if isinstance(value, self._torch.Tensor) and value.shape == self._parameter.shape:
                self.rows[key] = value.numpy()
            else:
                self.numbers[key] = float(value)

    def keep(self, numbers: dict[str, Any], rows: dict[str, Array]) -> None:
        """As `RowRule`."""
        torch = self._torch
        for key, value in rows.items():
            if value.shape != self.values.shape:
                raise ProtocolError(f"worker 0 loads {key!r} as {list(value.shape)}, which is not of this table")
        counted: Any = (lambda number: torch.tensor(float(number))) if self.spec.rule == "Adagrad" else int
        self._optimizer.state[self._parameter] = {
            **{key: counted(number) for key, number in numbers.items()},
            **{key: torch.from_numpy(value) for key, value in rows.items()},
        }
        self.numbers, self.rows = {}, {}
        self._sort()
