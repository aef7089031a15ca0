"""Send and receive as operators of TensorFlow, with gradients: that of a send is a receive, and the other way round."""

from __future__ import annotations

import functools
import math
from typing import Any

import tensorflow as tf

from tensorwire.errors import ArgumentError
from tensorwire.tensorflow.escapes import when_traced
from tensorwire.tensorflow.operator_edges import edge_name, load_operators, operator_edges


def send(tensor: Any, key: str, *, to: int, step: Any = None) -> Any:
    """Sends a tensor to another worker, which calls `recv` with the same key. It does not wait for that.

    Gradients come back: differentiate what is returned.

    Args:
        tensor: A tensor of numbers, whose shape is known when it is traced.
        key: The name of the edge, which this worker and the other one share.
        to: The rank of the other worker.
        step: A number from 1 that the receive has, too: every number comes once, in any order. None: the n-th send
            meets the n-th receive.

    Returns:
        A float32 scalar, zero. Its gradient with respect to ``tensor`` is the other worker's gradient with respect to
        the received tensor.

    Raises:
        ArgumentError: This process is in no job, or the key is taken for something else.
    """
    tensor = tf.convert_to_tensor(tensor)
    return _send(tensor, edge_name(_checked(key), operator_edges().worker.rank, to), to, step)


def recv(
    key: str, shape: Any, dtype: Any = tf.float32, *, source: int, step: Any = None, copy: bool | None = None
) -> Any:
    """Receives a tensor from another worker, which calls `send` with the same key, before or after.

    Args:
        key: As for `send`.
        shape: The tensor's shape.
        dtype: Its dtype.
        source: The rank of the other worker.
        step: As for `send`.
        copy: Whether the tensor is a copy. Otherwise it is the memory that it was written to, and while two of a key
            are kept, no other one arrives. None: a copy outside of functions, and where it may outlive the call of its
            function, as what is returned or assigned to a variable does.

    Returns:
        The tensor. Where a ``tf.GradientTape`` records it, its gradient is sent back.

    Raises:
        ArgumentError: As for `send`.
    """
    name = edge_name(_checked(key), source, operator_edges().worker.rank)
    return _receive(name, tf.TensorShape(shape), tf.as_dtype(dtype), source, step, copy)


def _checked(key: str) -> str:
    if not isinstance(key, str) or not key:
        raise ArgumentError(f"key must be a string, not {key!r:.100}")
    return key


def _send(tensor: Any, name: str, to: int, step: Any) -> Any:
    carries, nbytes = _described(name, tensor.shape, tensor.dtype)
    operator_edges().connect(name, "producer", to, carries, nbytes)
    return load_operators().ops.tensorwire_send(tensor, _number(step), key=name)


def _receive(name: str, shape: Any, dtype: Any, source: int, step: Any, copy: bool | None) -> Any:
    carries, nbytes = _described(name, shape, dtype)
    operator_edges().connect(name, "consumer", source, carries, nbytes)
    if copy is None and not tf.executing_eagerly():
        when_traced(tf.compat.v1.get_default_graph())
    copied = tf.executing_eagerly() if copy is None else copy
    return load_operators().ops.tensorwire_receive(
        _anchor().read_value(), _number(step), T=dtype, shape=shape, key=name, copy=copied
    )


def _described(name: str, shape: Any, dtype: Any) -> tuple[str, int]:
    if not shape.is_fully_defined():
        raise ArgumentError(f"{name}: the shape must be known, and this is {shape}")
    if dtype in (tf.string, tf.variant, tf.resource):
        raise ArgumentError(f"{name}: this is a tensor of {dtype.name}, and edges carry numbers")
    return f"{dtype.name}{shape.as_list()}", math.prod(shape.as_list()) * dtype.size


def _number(step: Any) -> Any:
    return tf.constant(0, tf.int64) if step is None else tf.cast(step, tf.int64)


@functools.cache
def _anchor() -> Any:
    """A variable that every receive reads, so that tapes, which watch it, record receives."""
    with tf.init_scope():
        return tf.Variable(0.0, trainable=True, name="tensorwire_anchor")


def _peers(name: str) -> tuple[str, int, int]:
    """Key, source and target of an edge by its name."""
    key, _, rest = name.rpartition(" from worker ")
    source, _, target = rest.partition(" to worker ")
    return key, int(source), int(target)


@tf.RegisterGradient("TensorwireSend")  # type: ignore[untyped-decorator]
def _gradient_of_send(op: Any, _: Any) -> list[Any]:
    tensor, step = op.inputs
    key, source, target = _peers(op.get_attr("key").decode())
    back = edge_name(f"gradient of {key}", target, source)
    return [_receive(back, tensor.shape, tensor.dtype, target, step, None), None]


@tf.RegisterGradient("TensorwireReceive")  # type: ignore[untyped-decorator]
def _gradient_of_receive(op: Any, gradient: Any) -> list[Any]:
    key, source, target = _peers(op.get_attr("key").decode())
    _send(gradient, edge_name(f"gradient of {key}", target, source), source, op.inputs[1])
    return [None, None]
