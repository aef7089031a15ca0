"""Checks and conversions of the arguments of `KeyValue` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tensorwire.device.checks import check_plain
from tensorwire.errors import ArgumentError

Key = str | int
_HOST = (1, 3, 11)  # DLPack's devices: the CPU, and memory that CUDA or ROCm has page-locked


def as_key(key: object) -> Key:
    """A key; numpy's integers are integers. Raises `ArgumentError` for what is none."""
    if isinstance(key, np.integer):
        return int(key)
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise ArgumentError(f"a key is a string or an integer, not {key!r:.100}")
    return key


def as_keys(keys: object) -> tuple[list[Key], bool]:
    """The keys of a call, and whether it names one alone, not a list. Raises `ArgumentError`."""
    if type(keys) is str or type(keys) is int:
        return [keys], True
    if isinstance(keys, np.ndarray):
        keys = keys.tolist()
    if isinstance(keys, Iterable) and not isinstance(keys, (str, bytes, Iterator)):
        return [as_key(each) for each in keys], False
    return [as_key(keys)], True


def pairs(keys: object, values: Any) -> list[tuple[Key, Any]]:
    """Each key with its value. Raises `ArgumentError` for what is no key, and where there are more of the ones."""
    listed, single = as_keys(keys)
    if single:
        return [(listed[0], values)]
    if not isinstance(values, (list, tuple)) or len(values) != len(listed):
        raise ArgumentError(f"{len(listed)} keys need a list of as many values")
    return list(zip(listed, values, strict=True))


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """Any array on the CPU as numpy's. Raises `ArgumentError`."""
    check_unmasked(value)
    if isinstance(value, np.ndarray):
        return value
    check_plain("this array", value)
    makers: tuple[Callable[[Any], np.ndarray[Any, Any]], ...] = (np.from_dlpack, np.asarray)
    why = ""
    for make in makers:
        try:
            return make(value)
        except (TypeError, AttributeError, BufferError, ValueError, RuntimeError) as error:
            why = why or str(error)
    raise ArgumentError(f"this {type(value).__name__} is no array on the CPU that numpy can read: {why}")


def check_unmasked(value: Any) -> None:
    """Raises `ArgumentError` for an array with a mask, which no server would see."""
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError("a masked array travels without its mask: give array.filled(value)")


def check_readable(key: Key, value: Any) -> None:
    """Raises `ArgumentError` for what is no array on the CPU whose memory holds its values."""
    check_unmasked(value)
    check_plain(f"key {key!r}", value)
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        try:
            on_host = value.__dlpack_device__()[0] in _HOST
            value.__dlpack__()
        except (TypeError, AttributeError, BufferError, ValueError, RuntimeError) as error:
            raise ArgumentError(f"the {type(value).__name__} for key {key!r} cannot be read: {error}") from None
        if not on_host:
            raise ArgumentError(f"the {type(value).__name__} for key {key!r} is not on the CPU: give a copy that is")


def check_whole(name: str, value: object) -> None:
    """Raises `ArgumentError` for what is no integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ArgumentError(f"{name} must be a whole number, not {value!r:.100}")


def number(name: str, value: Any) -> float:
    """A number that can be sent. Raises `ArgumentError` for others."""
    try:
        if not isinstance(value, (bool, str)) and isinstance(value, (int, float)):
            return float(value)
    except OverflowError:
        pass
    raise ArgumentError(f"{name} must be a number, not {value!r:.100}")


def plan_name(key: Key) -> str:
    """What the plan calls a key: 1, "1" and "[1]" are three keys."""
    if isinstance(key, int):
        return f"[{key}]"
    return f"'{key}" if key[:1] in ("[", "'") else key


def plain_option(name: str, value: Any) -> Any:
    """An option that can be sent. Raises `ArgumentError` for others."""
    if value is not None and not isinstance(value, (bool, int, float, str, list, tuple)):
        raise ArgumentError(f"the option {name} must be a number, a string or a list of these, not {value!r:.100}")
    return value
