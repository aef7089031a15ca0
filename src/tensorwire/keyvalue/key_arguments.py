"""What the calls of `KeyValue` take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tensorwire.errors import ArgumentError

Key = str | int


def pairs(keys: Key | Sequence[Key], values: Any) -> Iterable[tuple[Key, Any]]:
    """Each key with its value. Raises `ArgumentError` where there are more of the ones."""
    if isinstance(keys, (str, int)):
        return [(keys, values)]
    if not isinstance(values, (list, tuple)) or len(values) != len(keys):
        raise ArgumentError(f"{len(keys)} keys need a list of as many values")
    return list(zip(keys, values, strict=True))


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """Any array on the CPU as numpy's. Raises `ArgumentError`."""
    if isinstance(value, np.ndarray):
        return value
    makers: tuple[Callable[[Any], np.ndarray[Any, Any]], ...] = (np.from_dlpack, np.asarray)
    for make in makers:
        try:
            return make(value)
        except (TypeError, AttributeError, BufferError, ValueError, RuntimeError):
            continue
    raise ArgumentError(f"this {type(value).__name__} is no array on the CPU that numpy can read")


def plan_name(key: Key) -> str:
    """What the plan calls a key; 1 and "1" are two keys."""
    return key if isinstance(key, str) else f"[{key}]"


def plain_option(name: str, value: Any) -> Any:
    """An option that can be sent. Raises `ArgumentError` for others."""
    if value is not None and not isinstance(value, (bool, int, float, str, list, tuple)):
        raise ArgumentError(f"the option {name} must be a number, a string or a list of these, not {value!r:.100}")
    return value
