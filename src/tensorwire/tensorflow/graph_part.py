"""One worker's part of a cut function: its operators, and a send or a receive for each tensor that crosses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from tensorwire.graph.analysis import Analysis
from tensorwire.graph.ir import worker_name
from tensorwire.tensorflow.escapes import RECEIVE, RECEIVE_VARYING, SEND, SEND_VARYING, copy_what_escapes
from tensorwire.tensorflow.graph_importer import Imported, control_name, value_name
from tensorwire.tensorflow.grpc_nodes import GrpcNodes, add_constant
from tensorwire.tensorflow.operator_edges import Carried

_STEP = "tensorwire/step"  # a constant: the operators count
_ANCHOR = "tensorwire/anchor"

# `(value, source, target, carried)`: the name of that edge, whose end here is being connected.
Connect = Callable[[str, int, int, Carried], str]


class PartBuilder:
    """Builds the part of worker ``rank``. ``connect``: see above. ``grpc``: whether gRPC carries what crosses."""

    def __init__(
        self, function: Any, imported: Imported, analysis: Analysis, rank: int, connect: Connect, *, grpc: bool = False
    ) -> None:
        self._function, self._imported, self._connect = function, imported, connect
        self._rank, self._me, self._crossing = rank, worker_name(rank), analysis.crossing
        self._graph = graph_pb2.GraphDef()
        whole = function.graph.as_graph_def()
        self._graph.versions.CopyFrom(whole.versions)
        self._graph.library.CopyFrom(whole.library)
        self._names = {
            f.signature.name: f"{f.signature.name}_of_{analysis.plan.digest.hex()}" for f in whole.library.function
        }
        for function_def in self._graph.library.function:  # by new names: TensorFlow knows them with their devices
            function_def.signature.name = self._names[function_def.signature.name]
            for node in function_def.node_def:
                self._make_local(node)
        del self._graph.library.gradient[:]
        self._grpc = GrpcNodes(self._graph) if grpc else None
        self._received: dict[str, str] = {}  # by value, the node that receives it
        self._sends: list[str] = []

    def build(self) -> Callable[..., list[Any]]:
        """What runs the part: it takes the function's arguments, flat, and returns its results, flat."""
        add_constant(self._graph, _STEP, tf.constant(0, tf.int64))
        add_constant(self._graph, _ANCHOR, tf.constant(0.0))
        for value, (source, targets) in self._crossing.sent.items():
            if self._me in targets:
                self._add_receive(value, int(source.rpartition(" ")[2]))
        for name, op in self._imported.ops.items():
            if self._runs(name):
                self._add_operator(op)
        for value, (source, targets) in self._crossing.sent.items():
            if source == self._me:
                for target in targets:
                    self._add_send(value, int(target.rpartition(" ")[2]))
        return self._wrap()

    def _runs(self, name: str) -> bool:
        found = self._crossing.runs.get(name)
        return self._me in (self._crossing.holds[name] if found is None else found)

    # ---- nodes

    def _add_receive(self, value: str, source: int) -> None:
        carried = self._imported.carried(value)
        edge = self._connect(value, source, self._rank, carried)
        name = f"tensorwire/receive/{len(self._received)}"
        self._received[value] = name
        if self._grpc is not None:
            self._grpc.receive(name, carried, edge, (source, self._rank))
            return
        node = self._graph.node.add(
            op=RECEIVE_VARYING if carried.varies else RECEIVE, name=name, input=[_ANCHOR, _STEP]
        )
        node.attr["T"].type = carried.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(carried.shape.as_proto())
        node.attr["key"].s = edge.encode()

    def _add_send(self, value: str, target: int) -> None:
        carried = self._imported.carried(value)
        edge = self._connect(value, self._rank, target, carried)
        source = value
        if value not in self._imported.ops and ":" not in value:  # that an operator has run
            source = f"tensorwire/ran/{len(self._sends)}"
            add_constant(self._graph, source, tf.zeros([0], tf.bool))
            self._graph.node[-1].input.append("^" + value.removesuffix(control_name("")))
        name = f"tensorwire/send/{len(self._sends)}"
        self._sends.append(name)
        if self._grpc is not None:
            self._grpc.send(name, source, carried, edge, (self._rank, target))
            return
        node = self._graph.node.add(op=SEND_VARYING if carried.varies else SEND, name=name, input=[source, _STEP])
        node.attr["T"].type = carried.dtype.as_datatype_enum
        if carried.varies:
            node.attr["shape"].shape.CopyFrom(carried.shape.as_proto())
        node.attr["key"].s = edge.encode()

    def _add_operator(self, op: Any) -> None:
        node = self._graph.node.add()
        node.CopyFrom(op.node_def)
        self._make_local(node)
        del node.input[:]
        for tensor in op.inputs:
            node.input.append(self._received.get(value_name(tensor)) or str(tensor.name))
        for each in self._imported.waits[op.name]:
            token = control_name(each.name)
            if self._runs(each.name):
                node.input.append("^" + each.name)
            elif token in self._received:
                node.input.append("^" + self._received[token])

    def _make_local(self, node: node_def_pb2.NodeDef) -> None:
        """TensorFlow never learns of devices that it does not know."""
        node.device = ""
        node.attr.pop("_class", None)
        node.op = self._names.get(node.op, node.op)
        for value in node.attr.values():
            for function in (*([value.func] if value.HasField("func") else []), *value.list.func):
                function.name = self._names.get(function.name, function.name)

    # ---- the function

    def _wrap(self) -> Callable[..., list[Any]]:
        wrapped = tf.compat.v1.wrap_function(lambda: tf.import_graph_def(self._graph, name=""), [])
        graph, function = wrapped.graph, self._function
        there = {node.name for node in self._graph.node}
        captured = self._imported.captured
        arguments = [tensor for tensor in function.inputs if tensor.op.name not in captured]
        used = [number for number, tensor in enumerate(arguments) if tensor.op.name in there]
        handles = [name for name in captured if name in there]
        feeds = [graph.get_tensor_by_name(arguments[number].name) for number in used]
        feeds += [graph.get_tensor_by_name(f"{name}:0") for name in handles]
        fetches = [self._result(graph, tensor) for tensor in function.outputs]
        must = [op.name for op in function.graph.control_outputs if op.name in there]
        effects = [graph.get_operation_by_name(name) for name in (*self._sends, *must)]
        graph.outputs.extend(fetches)  # for the search; what is pruned has outputs of its own
        copy_what_escapes(graph)
        del graph.outputs[:]
        part = wrapped.prune(feeds, [*fetches, *effects])
        outer = [captured[name] for name in handles]

        def run(*flat: Any) -> list[Any]:
            # Private to TensorFlow 2.21. A call tries other ways first, and prints all arguments for each that fails.
            results = part._call_flat([flat[number] for number in used] + outer, part.captured_inputs)
            return list(results[: len(fetches)]) if isinstance(results, (list, tuple)) else []

        return run

    def _result(self, graph: Any, tensor: Any) -> Any:
        received = self._received.get(value_name(tensor))
        return graph.get_tensor_by_name(f"{received}:0" if received else tensor.name)
