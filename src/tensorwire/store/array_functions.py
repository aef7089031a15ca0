"""Functions as rules for keys and rows: ``function(parameter, gradient, state, options)`` over numpy arrays.

The attribute ``function.numpy = True`` says that a function takes arrays. It keeps numbers and arrays, or objects that
numpy takes for arrays, in ``state``, which is saved and restored with the keys. The state of a row begins as zeros, or
as the numbers that ``function.initial(options)`` returns by name.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from tensorwire.errors import ProtocolError, Unsupported
from tensorwire.store.foreign import load_rule
from tensorwire.store.rule_names import is_foreign
from tensorwire.store.sharding import PARAMETER_DTYPES, Piece
from tensorwire.store.state_transfer import NUMBER, Entry, Item
from tensorwire.store.store_layout import StoreSpec

Array = np.ndarray[Any, Any]
ArrayFunction = Callable[[Array, Array, dict[str, Any], dict[str, Any]], None]


def array_function(spec: StoreSpec) -> ArrayFunction | None:
    """The function that a rule names, if it is one of arrays. Raises as `load_rule`."""
    if not is_foreign(spec.rule):
        return None
    found: Any = load_rule(spec.rule, spec.folders, spec.sources, spec.groups[0])
    return cast(ArrayFunction, found) if getattr(found, "numpy", False) else None


def like(given: Any, value: float) -> Any:
    """``value`` as the type that the option was given as, if it is of that type."""
    if isinstance(given, bool):
        return bool(value)
    if isinstance(given, int) and float(value).is_integer():
        return int(value)
    return value


class OptionsInForce:
    """The options of a rule, with the numbers that pushes carry."""

    def __init__(self, spec: StoreSpec) -> None:
        self._group = dict(spec.groups[0])
        self._numeric = [name for _, name, index in spec.numeric if index < 0]

    def of(self, block: bytes) -> dict[str, Any]:
        """Those in force with a packed option block."""
        return self.with_numbers(struct.unpack(f"<{len(block) // 8}d", block))

    def with_numbers(self, values: Sequence[float]) -> dict[str, Any]:
        """Those in force with these numbers, in the order of the option block."""
        return {**self._group, **dict(zip(self._numeric, values, strict=True))}


def kept_items(
    tensor: int, state: dict[str, Any], like: Array, start: int = 0, shape: tuple[int, ...] | None = None
) -> Iterator[Item]:
    """What a function keeps for the tensor of that number, whose values are ``like``, as entries.

    With ``shape``, that of the tensor, ``like`` is a flat part of it, its elements from ``start`` on.
    """
    for key, value in state.items():
        if not isinstance(key, str):
            raise Unsupported(f"a rule keeps something under {key!r:.100}: names in its state are strings")
        if isinstance(value, (bool, int, float)):
            number = np.array([float(value)])
            yield Entry(tensor, key, "float64", (1,), False, 0, 1, NUMBER), number.view(np.uint8).data
            continue
        array = np.asarray(value) if hasattr(value, "__array__") else None
        if array is None or array.dtype.name not in PARAMETER_DTYPES:
            raise Unsupported(
                f"a rule keeps {key!r} as a {type(value).__name__}, which is neither a number nor an array"
            )
        flat = np.ascontiguousarray(array).reshape(-1)
        rows = array.shape == like.shape
        whole, at = (shape, start) if rows and shape is not None else (array.shape, 0)
        yield Entry(tensor, key, array.dtype.name, whole, rows, at, at + flat.size), flat.view(np.uint8).data


def load_item(state: dict[str, Any], entry: Entry, data: memoryview) -> None:
    """Puts an entry back, which may be a part of an array. Raises `ProtocolError`."""
    if entry.kind == NUMBER:
        state[entry.key] = float(np.frombuffer(data, entry.dtype)[0])
        return
    if entry.kind or entry.nbytes != len(data):
        raise ProtocolError(f"worker 0 loads {entry}, which no function keeps")
    array = state.setdefault(entry.key, np.empty(entry.shape, entry.dtype))
    array.reshape(-1)[entry.start : entry.stop] = np.frombuffer(data, entry.dtype)


def load_part(state: dict[str, Any], entry: Entry, data: memoryview, piece: Piece) -> None:
    """The same for a flat piece of a tensor, if the entry is of it. Raises `ProtocolError`."""
    if entry.tensor != piece.tensor:
        return
    if not entry.rows:
        load_item(state, entry, data)
    elif piece.start <= entry.start < piece.stop:
        size, start, stop = (n - piece.start for n in (piece.stop, entry.start, entry.stop))
        load_item(state, msgspec.structs.replace(entry, shape=(size,), start=start, stop=stop), data)
