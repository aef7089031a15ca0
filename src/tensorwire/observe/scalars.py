"""A script's reports about its training: the latest values by name, samples, and progress."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tensorwire.errors import ArgumentError

MOST_NAMES = 32
MOST_LETTERS = 64
_MOST = 2**63 - 1


@dataclass(frozen=True)
class ScalarSnapshot:
    """``step`` of ``total`` steps (0: unknown); ``samples`` so far; the latest ``values``."""

    step: int = 0
    total: int = 0
    samples: int = 0
    values: Mapping[str, float] = field(default_factory=dict)


class Scalars:
    """Those of this process. Any thread may report."""

    def __init__(self) -> None:
        self._latest = ScalarSnapshot()
        self._lock = threading.Lock()

    def report(
        self, values: Mapping[str, Any], *, step: int | None, total: int | None, samples: int | None
    ) -> tuple[int, dict[str, float]]:
        """Takes over what is given; returns the step and the values as floats. Raises `ArgumentError`."""
        numbers = {name: _number(name, value) for name, value in values.items()}
        for name, count in (("step", step), ("total", total), ("samples", samples)):
            if count is not None and (type(count) is not int or not 0 <= count <= _MOST):
                raise ArgumentError(f"job.report: {name} is a whole number, 0 or more, not {count!r}")
        with self._lock:
            latest = self._latest
            merged = {**latest.values, **numbers}
            if len(merged) > MOST_NAMES or not all(map(_is_name, numbers)):
                raise ArgumentError(f"job.report takes {MOST_NAMES} printable names of {MOST_LETTERS} bytes at most")
            self._latest = ScalarSnapshot(
                latest.step + 1 if step is None else step,
                latest.total if total is None else total,
                min(latest.samples + (samples or 0), _MOST),
                merged,
            )
            return self._latest.step, numbers

    def snapshot(self) -> ScalarSnapshot:
        """What was reported so far."""
        with self._lock:
            return replace(self._latest)

    def clear(self) -> None:
        """Forgets all of it: another job begins."""
        with self._lock:
            self._latest = ScalarSnapshot()


def _is_name(name: str) -> bool:
    return name.isprintable() and 0 < len(name.encode()) <= MOST_LETTERS


def _number(name: str, value: Any) -> float:
    if hasattr(value, "detach"):  # a tensor that requires a gradient would warn
        value = value.detach()
    try:
        if type(value) not in (int, float, bool):
            value = value.item()
        return float(value)
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError):
        what = f"a {type(value).__name__}"
        if hasattr(value, "shape"):
            what += f" of shape {list(value.shape)}"
        raise ArgumentError(f"job.report: {name} is one number, not {what}") from None


scalars = Scalars()
