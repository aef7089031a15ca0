"""Rules of numpy arrays, as a user's module would have them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def momentum(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """SGD with momentum, and a count of calls that slows it down."""
    state["calls"] = int(state.get("calls", 0)) + 1
    moved = state.setdefault("moved", np.zeros_like(parameter))
    np.multiply(moved, options["momentum"], out=moved)
    moved += gradient
    parameter -= options["lr"] / state["calls"] * moved


momentum.numpy = True  # type: ignore[attr-defined]


def what_is_imported(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """1 where the server's process has imported torch."""
    parameter[...] = "torch" in sys.modules


what_is_imported.numpy = True  # type: ignore[attr-defined]


def leaning(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """Adds a share of all that was pushed, the less the more there was."""
    state["count"] = state.get("count", 0) + 1
    total = state.setdefault("total", np.zeros_like(parameter))
    total += gradient
    parameter += np.float32(options["alpha"] / state["count"]) * total


leaning.numpy = True  # type: ignore[attr-defined]


class Kept:
    """What numpy takes for an array."""

    def __init__(self, values: Any) -> None:
        self.values = np.array(values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.values, dtype)


def fading(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """What is kept begins with a half; of keys as another kind of array."""
    first = np.full(parameter.shape, options["first"], parameter.dtype)
    kept = np.asarray(state.get("kept", first)) / 2 + gradient
    state["kept"] = Kept(kept) if options["kinds"] else kept
    parameter += kept


fading.numpy = True  # type: ignore[attr-defined]
fading.initial = lambda options: {"kept": options["first"]}  # type: ignore[attr-defined]


def keeps_a_name(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """Keeps what cannot be saved."""
    state["name"] = "x"


keeps_a_name.numpy = True  # type: ignore[attr-defined]


def of_tensors(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """Does not say that it takes arrays."""
    parameter += gradient
