"""What the calls of `KeyValue` take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tensorwire.errors import ArgumentError
from tensorwire.store.rule_names import folders_with, hash_of, is_foreign, module_file

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


def origin(rule: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a `StoreSpec` says of a rule that is an import path, so that servers find the same; else nothing."""
    if not is_foreign(rule):
        return {}
    module = rule.partition(":")[0]
    file, package = module_file(module), module_file(module.partition(".")[0])
    source = "" if file is None else hash_of([file])
    return {"arguments": dict(options), "source": source, "folders": folders_with([package])}
