"""Send and receive as operators of TensorFlow. The gradient of a send is a receive, and the other way round."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tensorwire.control.names import member_name
from tensorwire.edge.agreement import Side
from tensorwire.errors import ArgumentError
from tensorwire.tensorflow.escapes import when_traced
from tensorwire.tensorflow.operator_edges import Carried, edge_ends, edge_name, load_operators, operator_edges


def send(tensor: Any, key: str, *, to: int, step: Any = None, shape: Any = None) -> Any:
    """Sends a tensor to another worker, which calls `recv` with the same key. It does not wait for that.

    To get gradients back, differentiate the result.

    Args:
        tensor: A tensor of numbers, strings or variants.
        key: The name of the edge, common to both workers.
        to: The rank of the other worker.
        step: A number from 1 that matches the receive's: every number comes once, in any order. None: the n-th send
            matches the n-th receive.
        shape: The receive's shape, needed if it leaves open lengths that the tensor has. None: the tensor's shape, as
            far as tracing knows it.

    Returns:
        A float32 scalar, zero. Its gradient with respect to ``tensor`` is the other worker's gradient with respect to
        the received tensor.

    Raises:
        ArgumentError: This process is in no job, the key has another use, the tensor does not have the ``shape``, or
            it is a resource.
        tf.errors.UnimplementedError: TensorFlow cannot encode a variant, or the encoded tensor exceeds 2 GiB.
    """
    tensor = tf.convert_to_tensor(tensor)
    peer = member_name("worker", to)
    name = edge_name(_checked(key), operator_edges().member.name, peer)
    taken = tensor.shape if shape is None else tf.TensorShape(shape)
    if not taken.is_compatible_with(tensor.shape):
        raise ArgumentError(f"{name}: the tensor has shape {tensor.shape}, and the receive takes {taken}")
    return send_to(tensor, name, peer, step, taken)


def recv(
    key: str, shape: Any, dtype: Any = tf.float32, *, source: int, step: Any = None, copy: bool | None = None
) -> Any:
    """Receives a tensor from another worker, which calls `send` with the same key, before or after.

    Args:
        key: As for `send`.
        shape: The tensor's shape, with None for lengths that may vary from step to step; ``tf.TensorShape(None)``: any
            shape.
        dtype: Its dtype.
        source: The rank of the other worker.
        step: As for `send`.
        copy: Whether the tensor is a copy. Otherwise it is the memory that it was written to, and while you keep two of
            a key, no other one arrives. None: a copy outside of functions, and for tensors that can outlive the call of
            their function, because it returns them or assigns them to a variable. Strings, variants and tensors of
            varying shape always have memory of their own.

    Returns:
        The tensor. If a ``tf.GradientTape`` records it, its gradient is sent back.

    Raises:
        ArgumentError: As for `send`.
    """
    peer = member_name("worker", source)
    name = edge_name(_checked(key), peer, operator_edges().member.name)
    return receive_from(name, tf.TensorShape(shape), tf.as_dtype(dtype), peer, step, copy)


def _checked(key: str) -> str:
    if not isinstance(key, str) or not key:
        raise ArgumentError(f"key must be a string, not {key!r:.100}")
    return key


def send_to(tensor: Any, name: str, to: str, step: Any, shape: Any) -> Any:
    """`send`, by the name of an edge to a member of the job."""
    carried = _connected(name, "producer", to, shape, tensor.dtype)
    ops, key = load_operators().ops, operator_edges().operator_key(name)
    if not carried.varies and not tensor.shape.is_fully_defined():  # of another size it would not fit into its slot
        tensor = tf.ensure_shape(tensor, shape)
    return ops.tensorwire_send(tensor, _number(step), shape=shape, key=key)


def receive_from(name: str, shape: Any, dtype: Any, source: str, step: Any, copy: bool | None) -> Any:
    """`recv`, by the name of an edge from a member of the job."""
    carried, ops = _connected(name, "consumer", source, shape, dtype), load_operators().ops
    anchor, number, key = _anchor().read_value(), _number(step), operator_edges().operator_key(name)
    copied = carried.varies or (tf.executing_eagerly() if copy is None else copy)
    if copy is None and not copied:
        when_traced(tf.compat.v1.get_default_graph())
    return ops.tensorwire_receive(anchor, number, T=dtype, shape=shape, key=key, copy=copied)


def _connected(name: str, side: Side, peer: str, shape: Any, dtype: Any) -> Carried:
    if dtype == tf.resource:
        raise ArgumentError(f"{name}: this is a tensor of {dtype.name}, which cannot leave its worker")
    carried = Carried(dtype, shape)
    operator_edges().connect(name, side, peer, carried)
    return carried


def _number(step: Any) -> Any:
    return tf.constant(0, tf.int64) if step is None else tf.cast(step, tf.int64)


@functools.cache
def _anchor() -> Any:
    """A variable that every receive reads, so that tapes, which watch it, record receives."""
    with tf.init_scope():
        return tf.Variable(0.0, trainable=True, name="tensorwire_anchor")


@tf.RegisterGradient("TensorwireSend")  # type: ignore[untyped-decorator]
def _gradient_of_send(op: Any, _: Any) -> list[Any]:
    tensor, step = op.inputs
    if not _has_gradient(tensor.dtype):
        return [None, None]
    key, source, target = edge_ends(op.get_attr("key").decode())
    back = edge_name(f"gradient of {key}", target, source)
    return [receive_from(back, _shape_of(op), tensor.dtype, target, step, None), None]


@tf.RegisterGradient("TensorwireReceive")  # type: ignore[untyped-decorator]
def _gradient_of_receive(op: Any, gradient: Any) -> list[Any]:
    if _has_gradient(gradient.dtype):
        key, source, target = edge_ends(op.get_attr("key").decode())
        send_to(gradient, edge_name(f"gradient of {key}", target, source), source, op.inputs[1], _shape_of(op))
    return [None, None]


def _shape_of(op: Any) -> Any:
    return tf.TensorShape(op.get_attr("shape"))


def _has_gradient(dtype: Any) -> bool:
    return bool(dtype.is_floating or dtype.is_complex)
