"""Nodes that send and receive through the collectives of TensorFlow's gRPC runtime."""

from __future__ import annotations

import zlib
from typing import Any

import tensorflow as tf

from tensorwire.control.settings import step_timeout
from tensorwire.errors import Unsupported
from tensorwire.tensorflow.operator_edges import Carried

_GRPC_DTYPES = ("bool", "float32", "float16", "float64", "int32", "int64")  # that collectives carry


def add_constant(graph: Any, name: str, value: Any) -> str:
    """Adds a constant to a graph definition, and returns its name."""
    node = graph.node.add(op="Const", name=name)
    node.attr["dtype"].type = value.dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    return name


class GrpcNodes:
    """The nodes that send and receive by gRPC: a broadcast in a group of two.

    Args:
        graph: A graph definition that they are added to.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def send(self, name: str, source: str, carried: Carried, key: str, peers: tuple[str, str]) -> None:
        """Adds what sends ``source``. Raises `Unsupported`."""
        _check_carried(key, carried)
        node = self._graph.node.add(op="CollectiveBcastSendV2", name=name)
        node.input.extend([source, *self._keys(name, key, peers)])
        self._finish(node, carried.dtype)

    def receive(self, name: str, carried: Carried, key: str, peers: tuple[str, str]) -> None:
        """Adds what receives a tensor of that shape and dtype. Raises `Unsupported`."""
        _check_carried(key, carried)
        shape = add_constant(self._graph, f"{name}/shape", tf.constant(carried.shape.as_list(), tf.int32))
        node = self._graph.node.add(op="CollectiveBcastRecvV2", name=name)
        node.input.extend([*self._keys(name, key, peers), shape])
        node.attr["Tshape"].type = tf.int32.as_datatype_enum
        self._finish(node, carried.dtype)

    def _keys(self, name: str, key: str, peers: tuple[str, str]) -> list[str]:
        numbers = {"size": 2, "group": 1 + _number(f"{min(peers)} {max(peers)}"), "instance": 1 + _number(key)}
        return [
            add_constant(self._graph, f"{name}/{what}", tf.constant(value, tf.int32)) for what, value in numbers.items()
        ]

    def _finish(self, node: Any, dtype: Any) -> None:
        node.attr["T"].type = dtype.as_datatype_enum
        node.attr["communication_hint"].s = b"auto"
        node.attr["timeout_seconds"].f = step_timeout()


def _check_carried(key: str, carried: Carried) -> None:
    if carried.dtype.name not in _GRPC_DTYPES or carried.varies:
        raise Unsupported(
            f"{key} carries {carried.text}, and gRPC carries numbers of {', '.join(_GRPC_DTYPES)}, of a shape that is "
            "known: use protocol 'tensorwire'"
        )


def _number(text: str) -> int:
    """The same positive number on both workers."""
    return zlib.crc32(text.encode()) & 0x3FFFFFFF
