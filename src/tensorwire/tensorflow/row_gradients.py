"""Rows of a layer in TensorFlow's graphs, and the push of their gradients with the next step of an optimizer.

A layer without variables is in no list of gradients. So every step of any Keras optimizer in this process, even of one
that does not know Tensorwire, first pushes the gradients since the last one.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tensorwire.errors import TensorwireError, Unsupported
from tensorwire.keyvalue.row_sums import RowSums
from tensorwire.keyvalue.row_table import Table
from tensorwire.launch.worker import Worker
from tensorwire.tensorflow.error_texts import failure_text
from tensorwire.tensorflow.keras_rules import RATE

# What an optimizer does with gradients, and would do with those of an ordinary embedding.
_REFUSED = ("clipnorm", "global_clipnorm", "gradient_accumulation_steps")
_ALIKE = ("clipvalue", "loss_scale_factor")  # which servers do, too

_numbers, _lookups = itertools.count(), itertools.count()
# By their numbers, because all workers push in the same order.
_every: weakref.WeakValueDictionary[int, Rows] = weakref.WeakValueDictionary()
_inner: weakref.WeakSet[Any] = weakref.WeakSet()


class Rows:
    """The table of a layer.

    Args:
        optimizer: That of the layer, whose learning rate goes with every push.
        what: The layer, for messages.
    """

    def __init__(self, worker: Worker, table: Table, optimizer: Any, what: str) -> None:
        self.table, self.optimizer, self.what = table, optimizer, what
        self._sums = RowSums(worker, table, what)
        self._differentiated: set[int] = set()  # lookups, since the last push
        _anchor()
        _every[next(_numbers)] = self
        _watch_steps()

    @property
    def waiting(self) -> bool:
        """Whether there are gradients to push."""
        return self._sums.waiting

    # ---- operators, or what they do at once

    def look_up(self, unique: Any) -> Any:
        """The rows of these numbers, each of which comes once. Their gradient waits for `push`."""
        dtype = tf.as_dtype(self.table.dtype)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def pulled(anchor: Any) -> Any:
            with tf.control_dependencies([anchor]):
                rows, lookup = _called(self._pull, [unique], [dtype, tf.int64])
            rows.set_shape([None, *self.table.shape[1:]])

            def gradient(upstream: Any) -> Any:
                given = [lookup, unique, tf.convert_to_tensor(upstream)]  # which may be sparse
                with tf.control_dependencies([_called(self._add, given, tf.float32)]):
                    _anchor().assign_add(0.0)

            return rows, gradient

        return pulled(_anchor().read_value())

    def push(self) -> None:
        """Pushes the sum of the gradients since the last push, if there is one."""
        _in_order(self.push_now)

    def drop(self) -> None:
        """Forgets these gradients."""
        _in_order(self._drop)

    # ---- what happens when TensorFlow runs

    def push_now(self) -> None:
        """As `push`, outside of graphs."""
        if self._sums.waiting:
            self.table.set_options(**{RATE: float(keras.ops.convert_to_numpy(self.optimizer.learning_rate))})
            self._sums.push()
            self.optimizer.iterations.assign_add(1)
        self._differentiated.clear()

    def _drop(self) -> None:
        self._sums.drop()
        self._differentiated.clear()

    def _pull(self, numbers: Any) -> Any:
        pull = self.table.pull(numbers)
        pull.finish(None)
        return pull.result, np.int64(next(_lookups))

    def _add(self, lookup: Any, numbers: Any, gradient: Any) -> Any:
        if int(lookup) in self._differentiated:  # nobody knows whether for the same variables, or for others
            raise Unsupported(
                f"a lookup of {self.what} is differentiated a second time in a step: take all gradients in one call of "
                "tape.gradient(), or look up again"
            )
        self._differentiated.add(int(lookup))
        self._sums.add(np.asarray(numbers), np.asarray(gradient))
        return np.float32(0)


def leave_to_store(inner: Any) -> None:
    """The steps of an optimizer are those of a `StoreOptimizer` around it."""
    _inner.add(inner)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def end_step(optimizer: Any) -> None:
    """Pushes the gradients of all layers, in a step of ``optimizer``; raises `Unsupported` if they were not right."""

    def push() -> None:
        every = list(_every.values())
        for rows in every:
            if rows.waiting:
                _refuse(optimizer, rows)
        for rows in every:
            rows.push_now()

    if _every:
        _in_order(push)


def _refuse(optimizer: Any, rows: Rows) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise Unsupported(f"servers do not scale losses, and {rows.what} goes without a LossScaleOptimizer")
    for name in _REFUSED:
        if getattr(optimizer, name, None):
            raise Unsupported(f"{name} would not see the gradients of {rows.what}: use no {name}")
    for name in _ALIKE:
        mine = getattr(optimizer, name, None)
        clips_nothing = name == "clipvalue" and mine is None
        if not clips_nothing and mine != getattr(rows.optimizer, name, None):
            raise Unsupported(f"{name} is not that of {rows.what}: give both optimizers the same {name}")


@functools.cache
def _watch_steps() -> None:
    for cls in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        cls.apply = _ending_steps(cls.apply)


def _ending_steps(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if self not in _inner:
            end_step(self)
        return apply(self, *arguments, **named)

    return call


# ---- operators in order


@functools.cache
def _anchor() -> Any:
    """Pulls read it, so that tapes, which watch it, record them. What follows writes it, so that calls keep order."""
    with tf.init_scope():
        return tf.Variable(0.0, trainable=True, name="tensorwire_rows")


def _in_order(function: Callable[[], None]) -> None:
    """Calls it behind the gradients that have come before, and before pulls that come after it."""

    def call() -> Any:
        function()
        return np.float32(0)

    with tf.control_dependencies([_anchor().read_value()]):
        done = _called(call, [], tf.float32)
    with tf.control_dependencies([done]):
        _anchor().assign_add(0.0)


def _called(function: Callable[..., Any], given: Sequence[Any], dtype: Any) -> Any:
    """Calls it when TensorFlow runs, which knows no errors of ours, or at once."""

    def call(*values: Any) -> Any:
        try:
            return function(*values)
        except TensorwireError as error:
            raise RuntimeError(failure_text("", error)) from None

    return tf.numpy_function(function if tf.executing_eagerly() else call, given, dtype)
