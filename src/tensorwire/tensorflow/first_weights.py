"""What a model has besides the variables that are trained is equal on all workers at the start: worker 0's.

Frozen layers and statistics of a ``BatchNormalization``; states of seeds are left as they are, or all workers would
drop the same units. Only what differs travels.
"""

from __future__ import annotations

import gc
import hashlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tensorwire.control.settings import step_timeout
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
    mine = {
        name: [value.dtype.name, list(value.shape), hashlib.sha256(value.tobytes()).digest()]
        for name, value in values.items()
    }
    meet = worker.collectives
    theirs = meet.broadcast(mine, 0, step_timeout())
    alike = [n for n in theirs if n in mine and mine[n][:2] == theirs[n][:2]]
    differ = {n for n in alike if mine[n] != theirs[n]}
    wanted = meet.all_reduce(np.array([0, *(n in differ for n in theirs)], np.int64), "max", step_timeout())[1:]
    names = [n for n, anybody in zip(theirs, wanted, strict=True) if anybody]
    if names:
        sent = [values[n].reshape(-1).view(np.uint8) for n in names] if worker.rank == 0 else None
        for name, value in zip(names, meet.broadcast(sent, 0, step_timeout()), strict=True):
            if name in differ:
                now = values[name]
                found[name].assign(np.asarray(value).view(now.dtype).reshape(now.shape))
    other = [n for n in theirs if n not in alike] + [n for n in mine if n not in theirs]
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
