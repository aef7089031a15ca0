"""``StoreEmbedding``: a layer of Keras whose table lies only on the servers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.keyvalue.row_table import Table, check_embedding, embedding_table
from tensorwire.keyvalue.served_rows import ServedRows
from tensorwire.launch.worker import current_worker
from tensorwire.store.modes import SSP, Async, Sync, mode_of, settings_of
from tensorwire.tensorflow.error_texts import register
from tensorwire.tensorflow.keras_rules import ROW_RULE, is_elementwise
from tensorwire.tensorflow.keras_rules import settings_of as settings_of_optimizer
from tensorwire.tensorflow.row_gradients import Rows


@keras.saving.register_keras_serializable("tensorwire")
class StoreEmbedding(ServedRows, keras.layers.Layer):  # type: ignore[misc]
    """An embedding whose table no worker has to hold: rows are pulled in forward, their gradients pushed by a step.

    ::

        layer = tw.tensorflow.StoreEmbedding(10**8, 64, keras.optimizers.Adagrad(0.1))
        model = keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(1)])

    Gradients of several lookups and backward passes are summed. The next step of any optimizer in this process, a
    `StoreOptimizer` or one of Keras's, pushes the sum, or that of the layer itself, and servers, which need TensorFlow
    for it, apply it as one update. Each row travels once, however often it is named, and rows that are not named stay
    as they are, with their state.

    It has no variables, so clipping outside of an optimizer neither sees nor clips its gradients. Every worker builds
    the layer, in the same place of its program. With ``Sync()``, all workers have to take equally many steps that have
    a gradient of it. ``fit`` takes steps only if the model has a variable to train. `save` and `load` keep the rows;
    files of Keras have none of them.

    Args:
        input_dim: The number of rows.
        output_dim: Elements of a row.
        optimizer: An optimizer of Keras, or its name: one that treats each element by itself, without clipping by norms
            or weight decay. Its learning rate, which may be a schedule, goes with every push.
        mode: ``tw.store.Sync()``: an update has the gradients of all workers, and a pull waits for that of the worker's
            last push. ``Async()``: each worker's gradients are applied by themselves. ``SSP()``: the same, and a
            pull waits while this worker is more than ``staleness`` updates ahead of the slowest.
        reduce: ``"mean"`` or ``"sum"`` of the workers' gradients, with ``Sync()``.
        initial: How servers draw the first values: ``"uniform"``, ``"normal"`` or ``"zeros"``.
        scale: The bound of ``"uniform"``, the standard deviation of ``"normal"``.
        seed: From which they are drawn; None: a random one.
        **options: As for every layer of Keras, such as ``name`` and ``dtype``, which has to be float32 or float64 for
            variables.

    Raises:
        ArgumentError: An argument is wrong.
        Unsupported: Servers cannot run the optimizer on rows. Or, in a step of an optimizer: it scales losses, clips by
            norms or accumulates gradients; or its ``clipvalue`` or ``loss_scale_factor`` is another one than that of
            the layer's. Or, in ``tape.gradient()``: the same lookup has had a gradient in this step.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        optimizer: Any,
        *,
        mode: Sync | Async | SSP = Sync(),  # noqa: B008  # frozen
        reduce: str = "mean",
        initial: str = "uniform",
        scale: float = 0.05,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        check_embedding({"input_dim": input_dim, "output_dim": output_dim}, reduce, scale)
        super().__init__(**options)
        self.input_dim, self.output_dim = input_dim, output_dim
        self.optimizer = keras.optimizers.get(optimizer)
        self._settings = settings_of_optimizer(self.optimizer)
        if not is_elementwise(self.optimizer):
            raise Unsupported(f"{type(self.optimizer).__name__}, as it is given, does not treat each element by itself")
        if self.optimizer.weight_decay:
            raise Unsupported("weight decay changes rows that are not pushed, too: leave weight_decay out")
        self._mode, self._reduce, self._initial, self._scale, self._seed = mode, reduce, initial, float(scale), seed
        self._rows: Rows | None = None
        self.supports_jit = False

    # ---- what Keras asks for

    def build(self, input_shape: Any) -> None:
        """Makes the table, for which it waits until all workers have come.

        Raises:
            ArgumentError: This process is in no job with servers, or an argument is wrong.
            Unsupported: The dtype is another one, or the policy scales losses, as ``"mixed_float16"`` does.
            PlanMismatch: The workers' tables differ.
            WaitTimeout, JobEnded: Another worker did not come in time, or the job has ended.
        """
        if self.dtype_policy.name == "mixed_float16" or keras.config.dtype_policy().name == "mixed_float16":
            raise Unsupported("servers do not scale losses, as mixed_float16 needs")
        worker = current_worker()
        table = embedding_table(
            worker,
            (self.input_dim, self.output_dim),
            str(self.variable_dtype),
            drawn=int(np.random.default_rng().integers(2**63)),
            seed=self._seed,
            initial=self._initial,
            scale=self._scale,
            mode=self._mode,
            rule=ROW_RULE,
            options=self._settings,
            reduce=self._reduce,
        )
        register(worker)
        self._rows = Rows(worker, table, self.optimizer, f"StoreEmbedding {self.name!r}")
        self.built = True

    def call(self, inputs: Any) -> Any:
        """Looks rows up.

        Args:
            inputs: Integers from 0 to ``input_dim - 1``, of any shape.

        Returns:
            The rows, of the shape of ``inputs`` and ``output_dim``.

        Raises:
            ArgumentError: A number is out of range.
            WaitTimeout: The servers did not answer in time, because another worker did not push its gradients.
            JobEnded: The job ended; the message says why.
            tf.errors.UnknownError: One of these, in a ``tf.function``; the message says which.
        """
        numbers = tf.cast(inputs, tf.int64)
        unique, inverse = tf.unique(tf.reshape(numbers, [-1]))
        rows = tf.gather(self._table.look_up(unique), inverse)
        found = tf.reshape(rows, tf.concat([tf.shape(numbers), [self.output_dim]], 0))
        found.set_shape([*numbers.shape, self.output_dim] if numbers.shape.rank is not None else None)
        return tf.cast(found, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shape of what it returns."""
        return (*input_shape, self.output_dim)

    def compute_output_spec(self, inputs: Any) -> Any:
        """As for every layer of Keras."""
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """As for every layer of Keras."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "optimizer": keras.saving.serialize_keras_object(self.optimizer),
            "mode": settings_of(self._mode),
            "reduce": self._reduce,
            "initial": self._initial,
            "scale": self._scale,
            "seed": self._seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> StoreEmbedding:
        """As for every layer of Keras."""
        optimizer = keras.saving.deserialize_keras_object(config["optimizer"])
        return cls(**{**config, "optimizer": optimizer, "mode": mode_of(config["mode"])})

    # ---- ours

    @property
    def _table(self) -> Rows:
        if self._rows is None:
            raise ArgumentError("the layer is not built: call it, or the model, once before")
        return self._rows

    def _served(self) -> Table:
        return self._table.table

    def _push(self) -> None:
        self._table.push()

    def drop_gradients(self) -> None:
        """Drops the gradients since the last push, for a step that is to be left out."""
        self._table.drop()
