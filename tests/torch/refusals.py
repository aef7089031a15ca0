"""Calls that are to be refused, each with its error and a part of what that says, in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Refusal = tuple[type[Exception], str, Callable[[], Any]]


def not_refused(refusals: Iterable[Refusal]) -> list[str]:
    """What is wrong with each that is not refused as it says."""
    return [wrong for refusal in refusals if (wrong := _wrong(*refusal))]


def _wrong(kind: type[Exception], says: str, call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        return "" if says in str(error) and "\n" not in str(error) else f"{says!r}: {error}"
    except Exception as error:
        return f"{says!r}: {type(error).__name__}: {error}"
    return f"{says!r}: not refused"
