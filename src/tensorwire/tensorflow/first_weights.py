"""Gives all workers worker 0's untrained variables at the start.

These are frozen layers and statistics of a ``BatchNormalization``. States of seeds stay different, or all workers would
drop the same units. Only differing values travel.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tensorwire.control.settings import step_timeout
from tensorwire.launch.first_values import first_values, outline
from tensorwire.launch.worker import Worker

_trained: list[weakref.ref[Any]] = []  # by all stores of this process


def make_equal(worker: Worker, variables: Sequence[Any]) -> None:
    """The other weights of the layers and models that have ``variables`` become worker 0's.

    Raises `WaitTimeout` or `JobEnded`.
    """
    _trained.extend(weakref.ref(_held(v)) for v in variables)
    if worker.num_workers == 1:
        return
    found = dict(_others(variables))
    values = {name: np.ascontiguousarray(v.numpy()) for name, v in found.items()}
    mine = {name: outline(value.dtype.name, value.shape, value.tobytes()) for name, value in values.items()}
    first = first_values(worker, mine, lambda name: values[name].reshape(-1).view(np.uint8), step_timeout())
    for name, value in first.values.items():
        now = values[name]
        found[name].assign(np.asarray(value).view(now.dtype).reshape(now.shape))
    other = [n for n in first.names if n not in first.alike] + [n for n in mine if n not in first.names]
    if other:
        warnings.warn(
            f"{other[0]!r} and {len(other) - 1} other weights are not the same on worker 0 and here, and stay as they "
            "are: build the same model on all workers",
            stacklevel=2,
        )


def _others(variables: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """By names that are the same on all workers: weights that no store trains."""
    here = {id(_held(v)) for v in variables}
    known = {id(held) for each in _trained if (held := each()) is not None}
    counts: dict[str, int] = {}
    for layer in sorted(_layers(here), key=lambda layer: (-len(layer.weights), layer.name)):  # models first
        for weight in layer.weights:
            held = _held(weight)
            numeric = isinstance(held, tf.Variable) and (held.dtype.is_floating or held.dtype.is_integer)
            if not numeric or id(held) in known or not tf.compat.v1.is_variable_initialized(held):
                continue
            known.add(id(held))
            count = counts[weight.path] = counts.get(weight.path, 0) + 1
            yield f"{weight.path} {count}" if count > 1 else weight.path, weight


def _layers(here: set[int]) -> Iterable[Any]:
    """Those that have one of these variables: optimizers are not told of models."""
    every = [each for each in gc.get_objects() if issubclass(type(each), keras.layers.Layer)]
    built = [each for each in every if each.__dict__.get("built", False)]
    return [each for each in built if any(id(_held(v)) in here for v in each.trainable_weights)]


def _held(variable: Any) -> Any:
    """TensorFlow's own variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable
