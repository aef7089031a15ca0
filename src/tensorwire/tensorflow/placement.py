"""Places the operators and variables of a function: devices such as ``/job:worker/task:1``, `worker`, `server`.

Without a cluster, TensorFlow traces functions that name unknown devices, but refuses to run them or to create variables
there. So a variable only records its place. Gradients get the device of their forward operator, which TensorFlow leaves
to its own placer. TensorFlow calls parameter servers ``ps``.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe  # private to TensorFlow 2.21
from tensorflow.python.eager import backprop  # private to TensorFlow 2.21

from tensorwire.control.names import member_name
from tensorwire.errors import ArgumentError

_TASK = re.compile(r"/job:(worker|ps)(?:/replica:0)?/task:(\d+)(?:/|$)")
_ROLES = {"worker": "worker", "ps": "server"}  # by TensorFlow's jobs
_OWNER = "_tensorwire_owner"  # an attribute of variables
_variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by the id of their handle


def worker(rank: int) -> contextlib.AbstractContextManager[None]:
    """Variables that are created in it belong to a worker, and operators that are traced in it run there.

    ::

        with tw.tensorflow.worker(1):
            w = tf.Variable(tf.zeros([64, 10]))

    Args:
        rank: The worker's rank.

    Raises:
        ArgumentError: This is no rank.
    """
    return _on("worker", _checked("rank", rank))


def server(index: int) -> contextlib.AbstractContextManager[None]:
    """The same for a server of the job: variables lie there, for functions that are cut by `distribute`.

    ::

        with tw.tensorflow.server(0):
            w = tf.Variable(tf.zeros([64, 10]))

    Args:
        index: The server's number, from 0.

    Raises:
        ArgumentError: This is no number of a server.
    """
    return _on("ps", _checked("index", index))


def _checked(name: str, number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ArgumentError(f"{name} must be 0 or more, not {number!r:.100}")
    return number


@contextlib.contextmanager
def _on(job: str, number: int) -> Iterator[None]:
    def create(make: Any, **options: Any) -> Any:
        with tf.device(None):
            made = make(**options)
        setattr(made, _OWNER, member_name(_ROLES[job], number))
        _variables[id(made.handle)] = made
        return made

    with contextlib.ExitStack() as stack:
        stack.enter_context(tf.variable_creator_scope(create))
        if not tf.executing_eagerly():
            stack.enter_context(tf.device(f"/job:{job}/task:{number}"))
        yield


def variable_of(handle: Any) -> Any:
    """The variable of a handle that was created under `worker` or `server`; None: there is none."""
    return _variables.get(id(handle))


def owner_of(handle: Any) -> str:
    """Whose a variable is, by its handle: that of its scope, such as ``server 0``, else ``worker 0``."""
    found = variable_of(handle)
    return member_name("worker", 0) if found is None else str(getattr(found, _OWNER))


def member_of(device: str) -> str | None:
    """The worker or server that a device names; None: none. Raises `ArgumentError` for a job of another name."""
    if not device or device.startswith("/device:") or "/job:localhost" in device:
        return None
    found = _TASK.search(device)
    if found is None:
        raise ArgumentError(
            f"a device of a distributed function is /job:worker/task:N or /job:ps/task:N, and this is {device!r}"
        )
    return member_name(_ROLES[found.group(1)], int(found.group(2)))


@contextlib.contextmanager
def gradients_beside_their_operators() -> Iterator[None]:
    """While a function is traced: each gradient is put where its forward operator is.

    Private to TensorFlow 2.21: `backprop._gradient_function`, and where it is registered.
    """
    stock = backprop._gradient_function

    def placed(op_name: str, attributes: Any, count: int, inputs: Any, outputs: Any, *rest: Any) -> Any:
        forward = _forward_operator(op_name, inputs, outputs)
        with tf.device(forward.device or None if forward is not None else None):
            return stock(op_name, attributes, count, inputs, outputs, *rest)

    pywrap_tfe.TFE_Py_RegisterGradientFunction(placed)
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_RegisterGradientFunction(stock)


def _forward_operator(op_name: str, inputs: Any, outputs: Any) -> Any:
    """The operator whose gradient is asked for: it made the outputs, or it takes these inputs."""
    for tensor in outputs or ():
        if hasattr(tensor, "op"):
            return tensor.op
    for tensor in inputs or ():
        for op in tensor.consumers() if hasattr(tensor, "consumers") else ():
            if op.type == op_name and all(a is None or a is b for a, b in zip(inputs, op.inputs, strict=False)):
                return op
    return None
