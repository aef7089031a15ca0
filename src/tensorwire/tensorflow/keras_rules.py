"""Keras's optimizers on the servers: rules for keys and for rows, given by import path.

An optimizer travels as its configuration, in JSON. The learning rate comes with every push, as the worker has it. Each
key has an optimizer of its own, whose variables stay in TensorFlow's memory; rows are given to one as if they were all.
"""

from __future__ import annotations

import functools
import json
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.store.foreign import loaded

RULE = f"{__name__}:update"
ROW_RULE = f"{__name__}:update_rows"
_CONFIG, RATE = "optimizer", "learning_rate"  # the options
_VALUES = "parameter"
# Update each element from its own history alone: a cut variable gives the same values.
_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD")
# What no part of the variables can do by itself, or workers have to do.
_FOR_ALL = ("global_clipnorm", "use_ema", "gradient_accumulation_steps")
_WHOLE = ("Adafactor", "Lamb")
_LEAST_ROWS = 64
_turn = threading.Lock()  # optimizers for rows are shared by a server's threads

Array = np.ndarray[Any, Any]


def settings_of(optimizer: Any) -> dict[str, Any]:
    """The options of the rules that stand for an optimizer. Raises `Unsupported` for one that cannot be a server's."""
    cls = type(optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise Unsupported("servers do not scale losses, as mixed_float16 needs")
    for name in _FOR_ALL:
        if getattr(optimizer, name, None):
            raise Unsupported(f"{cls.__name__} with {name} looks at more than one variable or step: leave {name} out")
    if _leaves_weights_out(optimizer):
        raise Unsupported("servers know no names of variables, as exclude_from_weight_decay() needs")
    if cls.__module__ == "__main__":
        raise Unsupported(f"servers cannot import {cls.__qualname__}: put it into a module beside the script")
    found = keras.saving.serialize_keras_object(optimizer)
    if found["module"] == "keras.optimizers" and cls.__name__ not in _ELEMENTWISE + _WHOLE:
        raise Unsupported(f"servers do not run {cls.__name__}; they run {', '.join(_ELEMENTWISE + _WHOLE)}")
    found["config"][RATE] = 0.0  # a schedule is the worker's
    try:
        return {_CONFIG: json.dumps(found, sort_keys=True), RATE: 0.0}
    except TypeError as error:
        raise Unsupported(f"{cls.__name__} has an option that cannot be sent to servers: {error}") from None


def _leaves_weights_out(optimizer: Any) -> bool:
    if not hasattr(optimizer, "_exclude_from_weight_decay"):  # until exclude_from_weight_decay() was called
        return False
    return bool(optimizer._exclude_from_weight_decay or optimizer._exclude_from_weight_decay_pattern)


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer treats each element of a variable by itself."""
    cls = type(optimizer)
    return (
        cls.__name__ in _ELEMENTWISE
        and cls is getattr(keras.optimizers, cls.__name__)
        and getattr(optimizer, "clipnorm", None) is None
    )


def update(parameter: Array, gradient: Array, state: dict[str, Any], options: dict[str, Any]) -> None:
    """The rule for keys: one update of a variable, or of a flat part of one."""
    first = next(iter(state.values()), None)
    held = first.held if isinstance(first, _Kept) else None
    if held is None:
        held = _Held(options[_CONFIG], parameter.shape, parameter.dtype.name)
        held.load(state)
        state.update({name: _Kept(held, variable) for name, variable in held.kept.items()})
    held.update(parameter, gradient, options[RATE])


def update_rows(parameter: Array, gradient: Array, state: dict[str, Any], options: dict[str, Any]) -> None:
    """The rule for rows: those that were pushed, and what is kept for them."""
    count = len(parameter)
    padded = max(_LEAST_ROWS, 1 << (count - 1).bit_length())  # or there would be a graph for each number of rows
    with _turn:
        held = _held(options[_CONFIG], (padded, *parameter.shape[1:]), parameter.dtype.name)
        rows = {name for name, variable in held.kept.items() if variable.shape == held.shape}
        for name, variable in held.kept.items():
            old = state.get(name, held.initial[name])
            variable.assign(
                _pad(old, padded) if name in rows and np.ndim(old) else np.broadcast_to(old, variable.shape)
            )
        changed = _pad(parameter, padded)
        held.update(changed, _pad(gradient, padded), options[RATE])
        np.copyto(parameter, changed[:count])
        for name, variable in held.kept.items():
            state[name] = variable.numpy()[:count] if name in rows else float(variable.numpy())


def initial_rows(options: dict[str, Any]) -> dict[str, float]:
    """What is kept for each element of a row that has not been pushed yet, by its name."""
    held = _held(options[_CONFIG], (1, 1), "float32")
    return {name: held.initial[name] for name, variable in held.kept.items() if variable.shape == held.shape}


update.numpy = update_rows.numpy = True  # type: ignore[attr-defined]
update_rows.initial = initial_rows  # type: ignore[attr-defined]


class _Held:
    """An optimizer of one variable.

    Attributes:
        kept: Its variables by their names, but for the learning rate.
        initial: The number that each begins with.
    """

    def __init__(self, config: str, shape: tuple[int, ...], dtype: str) -> None:
        self.shape = shape
        with tf.device("/CPU:0"):
            self._optimizer = _optimizer_of(config)
            self._variable = keras.Variable(np.zeros(shape, dtype), dtype=dtype, name=_VALUES)
            self._optimizer.build([self._variable])
            self.kept: dict[str, Any] = {}
            for each in self._optimizer.variables:
                name = each.name.removeprefix(f"{_VALUES}_")
                if name != RATE:
                    self.kept[f"{name}{len(self.kept)}" if name in self.kept else name] = each
            self.initial = {
                name: float(tf.reshape(each.value, [-1])[0])
                for name, each in self.kept.items()
                if each.shape.num_elements()
            }
            values, rate = tf.TensorSpec(shape, dtype), tf.TensorSpec((), tf.float64)
            self._step = tf.function(self._update, autograph=False).get_concrete_function(values, values, rate)

    def _update(self, parameter: Any, gradient: Any, rate: Any) -> Any:
        self._variable.assign(parameter)
        self._optimizer.learning_rate = tf.cast(rate, tf.float32)
        self._optimizer.apply([gradient], [self._variable])
        return tf.identity(self._variable.value)

    def update(self, parameter: Array, gradient: Array, rate: float) -> None:
        """One update of ``parameter``, in place."""
        given = (tf.convert_to_tensor(each) for each in (parameter, gradient, np.float64(rate)))
        np.copyto(parameter, memoryview(self._step(*given)))

    def load(self, state: dict[str, Any]) -> None:
        """Takes what was saved under the names of ``kept``; others begin as they do."""
        for name, variable in self.kept.items():
            if name in state:
                variable.assign(np.reshape(state[name], variable.shape).astype(variable.dtype))


class _Kept:
    """One of its variables, which numpy takes for an array."""

    def __init__(self, held: _Held, variable: Any) -> None:
        self.held, self._variable = held, variable

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return np.asarray(self._variable.numpy(), dtype)


_held = functools.lru_cache(maxsize=32)(_Held)


def _imports(options: dict[str, Any]) -> list[str]:
    """The class of an optimizer that is not Keras's own."""
    found = json.loads(options[_CONFIG])
    own = found["module"].partition(".")[0] == "keras"
    return [] if own else [f"{found['module']}:{found['class_name']}"]


update.imports = update_rows.imports = _imports  # type: ignore[attr-defined]


def _optimizer_of(config: str) -> Any:
    told = json.loads(config)
    own = _imports({_CONFIG: config})
    custom = {told["registered_name"]: loaded(own[0])} if own else None
    found = keras.saving.deserialize_keras_object(told, custom_objects=custom, safe_mode=True)
    if not isinstance(found, keras.optimizers.Optimizer):
        raise ArgumentError(f"the rule {RULE} takes an optimizer of Keras, not a {type(found).__name__}")
    return found


def _pad(rows: Array, count: int) -> Array:
    padded = np.zeros((count, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded
