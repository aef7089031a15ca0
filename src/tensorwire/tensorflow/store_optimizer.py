"""``StoreOptimizer``: a Keras optimizer that trains one model on all workers, through the job's servers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tensorwire.control.settings import step_timeout
from tensorwire.errors import ArgumentError, TensorwireError, Unsupported
from tensorwire.launch.worker import Worker, current_worker
from tensorwire.store.compression import parse_compression
from tensorwire.store.modes import Mode, Sync, check_mode, check_reduce, mode_of, settings_of
from tensorwire.store.sharding import BUCKET_BYTES, ParameterSpec
from tensorwire.tensorflow.error_texts import register
from tensorwire.tensorflow.first_weights import make_equal
from tensorwire.tensorflow.row_gradients import end_step, leave_to_store
from tensorwire.tensorflow.server_rounds import ServerRounds
from tensorwire.tensorflow.store_rounds import LocalRounds, Rounds, make_rounds
from tensorwire.tensorflow.tensor_exchange import Bytes, TensorExchange, Values, fingerprint

_SYNC = Sync()
_numbers = itertools.count()
_SERVERS = "servers"  # in files of Keras's


@keras.saving.register_keras_serializable("tensorwire")
class StoreOptimizer(keras.optimizers.LossScaleOptimizer):  # type: ignore[misc]
    """Trains one model on all workers of the job, each on its own data, by ``model.fit`` or ``apply``.

    ::

        job = tw.init()
        model.compile(tw.tensorflow.StoreOptimizer(keras.optimizers.Adam(1e-3)), loss)
        model.fit(data.shard(job.num_workers, job.rank))

    With the first step, all workers get worker 0's variables. Each worker's optimizer then updates its own variables,
    and keeps its own state. In `Sync`, it gets the mean of all workers' gradients, so all have the same variables. In
    `Async` and `SSP`, servers add its changes to their values, and return these. In `EASGD`, `LocalSGD` and `DiLoCo`,
    workers exchange parameters every few steps. Other weights of their layers and models, such as frozen ones and the
    statistics of a ``BatchNormalization``, begin as worker 0's; then each worker keeps its own.

    With ``on_servers``, servers run the optimizer and keep its state, in `Sync`, `Async` and `SSP`: workers push
    gradients and get the new values, as from the parameter servers of ``tf.distribute``. Servers then need TensorFlow.

    After a change of trained variables, or of the optimizer's state, call `write_parameters` on every worker, unless
    each of them has loaded a file with the optimizer's state in it, which does so.

    It is a ``LossScaleOptimizer`` because Keras wraps every other optimizer in one if the policy is
    ``"mixed_float16"``, and the mean must be taken before a step is skipped. With that policy the given optimizer is
    wrapped.

    Args:
        optimizer: The optimizer of each worker, or its name, as ``model.compile`` takes it.
        mode: How the workers take turns, the same on all of them, as for ``tw.torch.StoreOptimizer``; ``damping`` must
            be 0. ``DiLoCo`` needs TensorFlow on the servers' machines, for its outer optimizer, Keras's ``SGD``.
        reduce: In `Sync`, ``"mean"`` or ``"sum"`` of the workers' gradients.
        on_servers: Whether servers run the optimizer. Not with ``global_clipnorm``, ``use_ema``,
            ``gradient_accumulation_steps``, ``exclude_from_weight_decay()`` or the policy ``"mixed_float16"``.
        compression: By what code workers push, as for ``tw.torch.StoreOptimizer``.
        bucket_bytes: The size of the store's buckets in bytes, a multiple of 4,096; 4 MiB by default.
        name: As for every optimizer of Keras.

    Raises:
        ArgumentError: An argument is wrong.
    """

    built: bool

    def __init__(
        self,
        optimizer: Any,
        *,
        mode: Mode = _SYNC,
        reduce: str = "mean",
        on_servers: bool = False,
        compression: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        name: str | None = None,
    ) -> None:
        inner = keras.optimizers.get(optimizer)
        if isinstance(inner, StoreOptimizer):
            raise ArgumentError("a StoreOptimizer takes an optimizer of Keras, not a StoreOptimizer")
        check_mode(mode)
        check_reduce(reduce)
        if keras.config.dtype_policy().name == "mixed_float16" and not _scales(inner):
            inner = keras.optimizers.LossScaleOptimizer(inner)
        super(keras.optimizers.LossScaleOptimizer, self).__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner
        leave_to_store(inner)
        self._mode, self._reduce, self._on_servers, self._bucket_bytes = mode, reduce, on_servers, bucket_bytes
        self._compression = str(parse_compression(compression) or "")
        self._share: _Share | None = None

    # ---- what Keras asks for

    def build(self, var_list: Sequence[Any]) -> None:
        """Makes the optimizer's state, and joins the store, for which it waits until all workers have come.

        Args:
            var_list: The variables to be trained.

        Raises:
            ArgumentError: This process is in no job with servers, or the mode does not go with it.
            Unsupported: The store does not hold a variable of this dtype, or one has no value yet.
            PlanMismatch: The workers' variables or settings differ.
            WaitTimeout, JobEnded: Another worker did not come in time, or the job has ended.
        """
        variables = list(var_list)
        if not self._on_servers:
            self.inner_optimizer.build(variables)
        super(keras.optimizers.LossScaleOptimizer, self).build(variables)
        with tf.init_scope():
            if not all(_is_initialized(variable) for variable in variables):
                raise Unsupported(
                    "a variable was made inside of the function that trains it, and has no value yet: build the model "
                    "before the first step"
                )
            self._share = _Share(self, variables)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """One step, as for every optimizer of Keras; inside a ``tf.function`` or outside.

        In a call of TensorFlow, an error is one of TensorFlow's, whose message says what to do: ``AbortedError`` where
        another worker is gone, ``FailedPreconditionError`` for others.

        Args:
            grads: A gradient a variable. Sparse ones are made dense. None, and a variable that is left out, counts as
                zero where another worker has a gradient in `Sync`; else the variable stays as it is.
            trainable_variables: The variables, if not those that the optimizer was built with. In other modes than
                `Sync` they must be all of these.
        """
        if trainable_variables is None and not self.built:
            raise ArgumentError("call apply(grads, variables), or build(variables) before")
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables)
            self.built = True
        assert self._share is not None
        end_step(self.inner_optimizer)
        self._share.step(list(grads), variables)

    @property
    def variables(self) -> list[Any]:
        """The optimizer's state."""
        return self._variables + self.inner_optimizer.variables  # type: ignore[no-any-return]

    def scale_loss(self, loss: Any) -> Any:
        """The loss as the worker's optimizer wants it."""
        return self.inner_optimizer.scale_loss(loss)

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras when a model is saved. Includes the servers' state."""
        super().save_own_variables(store)
        saved = None if self._share is None or self._share.closed else self._share.rounds.save()
        if saved is not None:
            store[_SERVERS] = saved

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras when a model is loaded: with the next step, worker 0's variables become everybody's."""
        saved = {name: store[name] for name in store.keys()}  # noqa: SIM118  # that of Keras is no mapping
        servers = saved.pop(_SERVERS, None)
        super().load_own_variables(saved)
        if self._share is not None and not self._share.closed:
            if servers is not None:
                self._share.rounds.restore(np.array(servers, np.uint8))
            self._share.loaded.assign(True)

    def get_config(self) -> dict[str, Any]:
        """As for every optimizer of Keras."""
        return {
            "name": self.name,
            "optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "mode": settings_of(self._mode),
            "reduce": self._reduce,
            "on_servers": self._on_servers,
            "compression": self._compression or None,
            "bucket_bytes": self._bucket_bytes,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> StoreOptimizer:
        """As for every optimizer of Keras."""
        optimizer = keras.saving.deserialize_keras_object(config["optimizer"], custom_objects=custom_objects)
        return cls(**{**config, "optimizer": optimizer, "mode": mode_of(config["mode"])})

    # ---- ours

    def write_parameters(self) -> None:
        """Worker 0's trained variables and optimizer state become everybody's. Call it on every worker, between steps.

        Raises:
            WaitTimeout: Another worker did not call it in time.
            JobEnded: The job ended; the message says why.
        """
        if self._share is not None:
            self._share.check_open()
            self._share.spread()

    def close(self) -> None:
        """Releases the store. Call it on every worker, in any order; when all have, the servers free their memory.

        It is for the time between two steps. The variables keep their values, and another step raises `ArgumentError`,
        or TensorFlow's ``AbortedError`` inside of a function. Idempotent.

        Raises:
            StepInterrupted: A step was interrupted when a part of it had left for the servers.
            WaitTimeout: With `DiLoCo`, the last exchange did not come in time. It is closed all the same.
            JobEnded: The job ended; the message says why.
        """
        if self._share is not None:
            self._share.close()

    def count(self, tokens: float) -> None:
        """Adds to the weight of this worker's next contributions, with ``DiLoCo(weight="tokens")``.

        Args:
            tokens: How many tokens, samples or the like the gradients of this step come from. Call it outside of
                functions, such as in a callback.

        Raises:
            ArgumentError: ``tokens`` is not a number from 1e-6 to 1e15, there was no step yet, or the mode has no such
                weights.
        """
        if self._share is not None:
            self._share.check_open()
        if self._share is None or not isinstance(self._share.rounds, LocalRounds):
            raise ArgumentError('count() is for mode=DiLoCo(weight="tokens"), after the optimizer was built')
        self._share.rounds.count(tokens)


class _Share:
    """What a worker's optimizer has of the store, from the first step on."""

    def __init__(self, optimizer: StoreOptimizer, variables: list[Any]) -> None:
        self._optimizer, self._variables = optimizer, variables
        self._updates: dict[tuple[int, ...], Any] = {}  # by the variables that some worker has gradients of
        self._worker: Worker = current_worker()
        tensors = [_spec(number, variable) for number, variable in enumerate(variables)]
        options = optimizer._mode, tensors, optimizer._reduce, optimizer._bucket_bytes, optimizer._compression
        self.rounds: Rounds = (
            ServerRounds(optimizer.inner_optimizer, *options)
            if optimizer._on_servers
            else make_rounds(self._worker, *options)
        )
        self.closed = False
        self.loaded = tf.Variable(False, trainable=False, name="tensorwire_loaded")
        register(self._worker)
        self._exchange = TensorExchange(f"store optimizer {next(_numbers)}", self._handle)
        self._worker.at_close(self._leave)
        if isinstance(optimizer._mode, Sync):
            self._worker.uneven_stores.append(self)
        self.spread(variables)
        with self._worker.member.explained():
            make_equal(self._worker, variables)

    # ---- a step

    def step(self, gradients: list[Any], variables: list[Any]) -> None:
        """Operators for a step, or the step itself."""
        self.check_open()
        spread = lambda: _empty(tf.py_function(self.spread, [], []))  # noqa: E731  # rare, and may be slow
        with tf.control_dependencies([tf.cond(self.loaded, spread, lambda: _empty(tf.no_op()))]):
            self._step(gradients, variables)

    def _step(self, gradients: list[Any], variables: list[Any]) -> None:
        numbers = self._numbers(variables)
        found = fingerprint([_value(v) for v in self._all()])
        inner = self._optimizer.inner_optimizer
        if self.rounds.takes_gradients:
            own = {n: g for n, g in zip(numbers, gradients, strict=True) if g is not None}
            every = range(len(self._variables))
            dense = [
                tf.cast(tf.convert_to_tensor(own.get(n, _value(v))), v.dtype) for n, v in enumerate(self._variables)
            ]
            here = tf.constant([float(n in own) for n in every], tf.float64)
            if self.rounds.brings_values:
                rate = tf.cast(inner.learning_rate, tf.float64)
                results = self._exchange(found, [*dense, here, rate], range(len(every) + 2))
                for variable, result in zip(self._variables, results, strict=False):
                    variable.assign(result)
                inner.iterations.assign_add(1)
                return
            *means, anywhere = self._exchange(found, [*dense, here], range(len(every) + 1))
            self._apply(means, sorted(own), anywhere)
            return
        if len(variables) != len(self._variables):
            raise Unsupported(f"{self._optimizer._mode!r} needs all variables in every step")
        inner.apply(gradients, variables)
        results = self._exchange(found, [_value(v) for v in self._variables], range(len(self._variables)))
        for variable, result in zip(self._variables, results, strict=True):
            variable.assign(result)

    def _apply(self, means: list[Any], own: list[int], anywhere: Any) -> None:
        """The worker's optimizer gets the means of the gradients that some worker has. ``own``: that this one has."""

        def update(numbers: Sequence[int], means: Sequence[Any]) -> Any:
            if numbers:
                inner = self._optimizer.inner_optimizer
                inner.apply([means[n] for n in numbers], [self._variables[n] for n in numbers])
            return _empty(None)

        def of_others(anywhere: Any, *means: Any) -> None:
            numbers = tuple(np.flatnonzero(anywhere.numpy()).tolist())
            if numbers not in self._updates:  # functions, or the bits might be others than those of other workers
                self._updates[numbers] = tf.function(lambda *means: update(numbers, means))
            update(numbers, means) if eager else self._updates[numbers](*means)

        eager = tf.executing_eagerly()
        lacking = [n for n in range(len(means)) if n not in own]
        if not lacking:
            update(own, means)
        elif eager:
            of_others(anywhere, *means)
        else:
            tf.cond(
                tf.reduce_any(tf.gather(anywhere, lacking) > 0),
                lambda: _empty(tf.py_function(of_others, [anywhere, *means], [])),
                lambda: update(own, means),
            )

    def _all(self) -> list[Any]:
        """What must be the same on all workers, or else what only steps may change."""
        workers = self.rounds.takes_gradients and not self.rounds.brings_values
        state = self._optimizer.inner_optimizer.variables if workers else []
        return [*self._variables, *state]

    def _numbers(self, variables: Sequence[Any]) -> list[int]:
        places = {id(v): number for number, v in enumerate(self._variables)}
        unknown = [v for v in variables if id(v) not in places]
        if unknown:
            raise ArgumentError(f"the optimizer was not built with {_name(unknown[0])}: build it with all variables")
        return [places[id(v)] for v in variables]

    def _handle(self, values: Values) -> None:
        with self._worker.member.explained():
            self.rounds.exchange(values)

    # ---- worker 0's variables

    def spread(self, variables: Sequence[Any] = ()) -> None:
        """Worker 0's variables and state become everybody's; or some trained ``variables``, and no state."""
        every = list(variables) or [*self._variables, *self._optimizer.inner_optimizer.variables]
        mine = [_bytes(_value(v).numpy()) for v in every] if self._worker.rank == 0 else None
        with self._worker.member.explained():
            theirs = self._worker.collectives.broadcast(mine, 0, step_timeout())
            if self._worker.rank:
                for variable, found in zip(every, theirs, strict=True):
                    _put(variable, found)
            self.rounds.assign([np.asarray(each) for each in theirs[: len(self._variables)]])
        self.loaded.assign(False)

    # ---- uneven numbers of steps

    def check_pausing(self) -> None:
        """Raises `Unsupported`: a worker that waits would miss updates."""
        raise Unsupported(
            "job.uneven() is not for a Keras optimizer with mode=Sync(): give every worker the same number of steps, "
            "as by dataset.repeat() and steps_per_epoch, or use another mode"
        )

    def idle(self) -> None:
        """It does not come to this."""

    def rejoin(self) -> None:
        """It does not come to this."""

    def check_open(self) -> None:
        """Raises `ArgumentError` after `close`."""
        if self.closed:
            raise ArgumentError("this optimizer was closed: compile the model with another one to go on")

    def close(self) -> None:
        """This worker is done before the job ends. Idempotent."""
        if self.closed or self._worker.closed:
            return
        self.closed = True
        self._worker.not_at_close(self._leave)
        self._worker.uneven_stores[:] = [each for each in self._worker.uneven_stores if each is not self]
        try:
            self._leave()
        except TensorwireError as error:
            raise self._worker.member.explain(error) from None
        finally:
            del self.rounds  # functions that TensorFlow has traced, and keeps, refer to this object

    def _leave(self) -> None:
        """This worker is done. What is on its way is taken into its variables."""
        self._exchange.close()
        values = Values({n: _bytes(_value(v).numpy()) for n, v in enumerate(self._variables)})
        self.rounds.complete(values)
        for number, found in values.results.items():
            _put(self._variables[number], found)
        self.rounds.finish()


def _is_initialized(variable: Any) -> bool:
    found = variable if isinstance(variable, tf.Variable) else variable.value
    return bool(tf.compat.v1.is_variable_initialized(found))


def _scales(optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def _empty(_: Any) -> Any:
    """So that both branches return the same."""
    return tf.zeros([])


def _value(variable: Any) -> Any:
    """The tensor of a variable of Keras or of TensorFlow."""
    value = variable.value
    return tf.convert_to_tensor(value() if callable(value) else value)


def _put(variable: Any, found: Bytes) -> None:
    value = _value(variable).numpy()
    variable.assign(found.view(value.dtype).reshape(value.shape))


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))


def _spec(number: int, variable: Any) -> ParameterSpec:
    dtype = tf.as_dtype(variable.dtype).name
    if "float" not in dtype:
        raise Unsupported(f"{_name(variable)} is of {dtype}: a StoreOptimizer trains floating-point variables")
    return ParameterSpec(f"{number} {_name(variable)}", tuple(variable.shape), dtype)


def _bytes(array: Any) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
