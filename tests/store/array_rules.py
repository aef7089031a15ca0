"""Rules of numpy arrays, as a user's module would have them."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from tensorwire.device import Region


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


def row_wise(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """Adagrad with one number for each row, under a name that is no plain one, and its square for pairs of elements."""
    for name, part in (("values", (gradient**2).mean(1)), ("../x", (gradient**2)[:, :2].reshape(-1, 1, 2))):
        state[name] = state.get(name, np.zeros_like(part)) + part
    parameter -= gradient / np.sqrt(state["values"])[:, None]


row_wise.numpy = True  # type: ignore[attr-defined]


def column_wise(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """Keeps a number for each column, which belongs to no row."""
    state["columns"] = gradient.sum(0)


column_wise.numpy = True  # type: ignore[attr-defined]


def keeps_strangely(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """Keeps arrays under names that mean something elsewhere."""
    for name in ("", "values", "../x", "index"):
        state[name] = state.get(name, 0) + gradient
        parameter -= state[name]


keeps_strangely.numpy = True  # type: ignore[attr-defined]


def keeps_a_name(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """Keeps what cannot be saved."""
    state["name"] = "x"


keeps_a_name.numpy = True  # type: ignore[attr-defined]


def of_tensors(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """Does not say that it takes arrays."""
    parameter += gradient


def what_is_held(parameter: Any, gradient: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """What the server's process has."""
    parameter[...] = held()


what_is_held.numpy = True  # type: ignore[attr-defined]


def held() -> list[int]:
    """Descriptors, threads of Python's, and bytes of registered memory of this process."""
    gc.collect()
    regions = [each for each in gc.get_objects() if issubclass(type(each), Region) and not each.closed]
    descriptors = list(Path("/proc/self/fd").iterdir())
    threads = [each for each in threading.enumerate() if each.name != "tensorwire-callbacks"]  # one, when first needed
    return [len(descriptors), len(threads), sum(region.nbytes for region in regions)]
