"""Numbers that people set in the environment."""

from __future__ import annotations

from collections.abc import Mapping

from tensorwire.errors import ArgumentError


def seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    """A number of seconds above 0. Raises `ArgumentError`."""
    text = environment.get(name, "")
    try:
        found = float(text) if text else default
    except ValueError:
        found = -1.0
    if not 0 < found < 1e6:
        raise ArgumentError(f"{name} must be a number of seconds above 0, not {text!r}")
    return found


def whole(environment: Mapping[str, str], name: str, default: int | None = None) -> int | None:
    """A whole number, or ``default`` where it is not set. Raises `ArgumentError`."""
    text = environment.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ArgumentError(f"{name} must be a whole number, not {text!r}") from None
