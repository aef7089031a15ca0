"""The options of a rule on a server: those that a store was made with, and the numbers that pushes carry."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from tensorwire.store.store_layout import StoreSpec


def like(given: Any, value: float) -> Any:
    """``value`` as the type that the option was given as, if it is of that type."""
    if isinstance(given, bool):
        return bool(value)
    if isinstance(given, int) and float(value).is_integer():
        return int(value)
    return value


def set_option(group: dict[str, Any], given: Any, option: str, index: int, value: float) -> None:
    """Sets a number of an option block in a group of an optimizer. ``given``: the option as it was given."""
    if index < 0:
        group[option] = like(given, value)
        return
    parts = list(group[option])
    parts[index] = like(given[index], value)
    group[option] = tuple(parts)


def tuples(value: Any) -> Any:
    """A list that was a tuple before it travelled."""
    return tuple(tuples(v) for v in value) if isinstance(value, list) else value


def numbers_in(block: bytes) -> tuple[float, ...]:
    """The numbers of a packed option block."""
    return struct.unpack(f"<{len(block) // 8}d", block)


class OptionsInForce:
    """The options of a function, with the numbers that pushes carry."""

    def __init__(self, spec: StoreSpec) -> None:
        self._group = dict(spec.groups[0])
        self._numeric = [name for _, name, index in spec.numeric if index < 0]

    def of(self, block: bytes) -> dict[str, Any]:
        """Those in force with a packed option block."""
        return self.with_numbers(numbers_in(block))

    def with_numbers(self, values: Sequence[float]) -> dict[str, Any]:
        """Those in force with these numbers, in the order of the option block."""
        return {**self._group, **dict(zip(self._numeric, values, strict=True))}
