"""Errors for operands of the wrong type, determined after an operation failed: earlier checks would slow every step."""

from __future__ import annotations

from typing import Any

from tensorwire.device.region import RemoteRegion, RemoteView
from tensorwire.errors import ArgumentError

_LOCAL = ("region", "offset", "nbytes")  # what every view has, also one of GPU memory


def explain(
    error: Exception,
    operation: str,
    *,
    remote: object,
    local: object = None,
    signal: object = None,
    values: tuple[object, ...] = (),
) -> Exception:
    """The error to raise instead of ``error``, a TypeError or AttributeError of ``operation``.

    Args:
        error: What was raised; returned as it is if every operand has the right type.
        operation: The channel's method.
        remote: Its operand in the peer's memory.
        local: Its operand in this process's memory, for a write and a read.
        signal: The signal of a write.
        values: What it would put into a word, or compare one with.
    """
    moves = operation in ("write", "read")
    blame = (_blame_local(operation, local) if moves else None) or _blame_remote(operation, remote)
    blame = blame or (None if signal is None else _blame_signal(signal))
    wrong = [value for value in values if not isinstance(value, int)]
    if blame is None and wrong:
        blame = f"{operation}: a word holds an int, not {_name(wrong[0])}"
    return error if blame is None else ArgumentError(blame)


def check_operands(operation: str, **operands: Any) -> None:
    """The same, ahead of an operation that is kept for later. Raises `ArgumentError`."""
    fine = TypeError()
    if (error := explain(fine, operation, **operands)) is not fine:
        raise error


def _blame_local(operation: str, local: object) -> str | None:
    if isinstance(local, (RemoteView, RemoteRegion)):
        return f"{operation}(local, remote): the first operand is the peer's memory; are the two swapped?"
    if all(hasattr(local, name) for name in _LOCAL):
        return None
    hint = "its view()" if hasattr(local, "view") else "region.view()"
    return f"{operation}(local, remote): the first operand is a View, not {_name(local)}: pass {hint}"


def _blame_remote(operation: str, remote: object) -> str | None:
    if isinstance(remote, RemoteView):
        return None
    hint = "its view()" if isinstance(remote, RemoteRegion) else "remote_region.view()"
    return f"{operation}: the peer's memory is a RemoteView, not {_name(remote)}: pass {hint}"


def _blame_signal(signal: object) -> str | None:
    pair = signal if isinstance(signal, (tuple, list)) else ()
    if len(pair) == 2 and isinstance(pair[0], RemoteView) and isinstance(pair[1], int):
        return None
    what = f"({', '.join(map(_name, pair))})" if pair else _name(signal)
    return f"a signal is a pair of a RemoteView of 8 bytes and an int, not {what}"


def _name(operand: object) -> str:
    return type(operand).__name__
