"""One member's part of a cut function: its operators, and a send or a receive for each crossing tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from tensorwire.edge.agreement import Side
from tensorwire.graph.analysis import Analysis
from tensorwire.graph.passes.causality import sends_before
from tensorwire.tensorflow.escapes import RECEIVE, SEND, copy_what_escapes
from tensorwire.tensorflow.graph_importer import Imported, control_name, value_name
from tensorwire.tensorflow.operator_edges import Carried, OperatorEdges, edge_name, operator_edges

_STEP = "tensorwire/step"  # a constant: the operators count
_ANCHOR = "tensorwire/anchor"


class PartEnd(msgspec.Struct, frozen=True):
    """The end of an edge that a part needs: its key, who has the other end, and what it carries."""

    key: str
    side: Side
    peer: str
    dtype: str
    shape: list[int | None] | None

    def connect(self, edges: OperatorEdges) -> None:
        """Begins to connect it."""
        carried = Carried(tf.as_dtype(self.dtype), tf.TensorShape(self.shape))
        edges.connect(self.key, self.side, self.peer, carried)


class GraphPart(msgspec.Struct, frozen=True):
    """What a member of the job runs of a function, as it may travel.

    Attributes:
        graph: A ``GraphDef``, serialized.
        arguments: Which of the function's arguments it takes.
        feeds: Where these go.
        captured: The placeholders of captured tensors, which come next.
        fetches: The function's results.
        effects: What else has to run.
        ends: The ends of edges.
    """

    graph: bytes
    arguments: list[int]
    feeds: list[str]
    captured: list[str]
    fetches: list[str]
    effects: list[str]
    ends: list[PartEnd]


def runnable(part: GraphPart, captured: Mapping[str, Any]) -> Callable[..., list[Any]]:
    """What runs a part: it takes the function's arguments, flat, and returns its results, flat.

    ``captured``: what goes to each of the placeholders.
    """
    definition = graph_pb2.GraphDef.FromString(part.graph)
    wrapped = tf.compat.v1.wrap_function(lambda: tf.import_graph_def(definition, name=""), [])
    graph = wrapped.graph
    feeds = [graph.get_tensor_by_name(name) for name in part.feeds]
    feeds += [graph.get_tensor_by_name(f"{name}:0") for name in part.captured]
    fetches = [graph.get_tensor_by_name(name) for name in part.fetches]
    effects = [graph.get_operation_by_name(name) for name in part.effects]
    graph.outputs.extend(fetches)  # for the search; what is pruned has outputs of its own
    copy_what_escapes(graph)
    del graph.outputs[:]
    pruned = wrapped.prune(feeds, [*fetches, *effects])
    outer = [captured[name] for name in part.captured]
    arguments, count = part.arguments, len(fetches)

    def run(*flat: Any) -> list[Any]:
        # Private to TensorFlow 2.21. A call tries other ways first, and prints all arguments for each that fails.
        results = pruned._call_flat([flat[number] for number in arguments] + outer, pruned.captured_inputs)
        return list(results[:count]) if isinstance(results, (list, tuple)) else []

    return run


def add_constant(graph: Any, name: str, value: Any) -> str:
    """Adds a constant to a graph definition, and returns its name."""
    node = graph.node.add(op="Const", name=name)
    node.attr["dtype"].type = value.dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    return name


class PartBuilder:
    """Builds the part of ``me``. ``name``: the function's, in edges."""

    def __init__(self, function: Any, imported: Imported, analysis: Analysis, me: str, name: str) -> None:
        self._function, self._imported = function, imported
        self._me, self._name, self._crossing = me, name, analysis.crossing
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
        self._received: dict[str, str] = {}  # by value, the node that receives it
        sends = [
            (value, target)
            for value, (source, targets) in self._crossing.sent.items()
            for target in targets
            if source == me
        ]
        self._sends = {each: f"tensorwire/send/{number}" for number, each in enumerate(sends)}  # by value and target
        # A receive begins when that has left without which it cannot come: TensorFlow's thread is then free to look.
        self._before = sends_before(imported.graph, self._crossing, me)
        self._ends: list[PartEnd] = []

    def build(self, calls: Mapping[str, tuple[str, int]] | None = None) -> GraphPart:
        """The part. ``calls``: the key of an edge to each server, and the number that it sends in every call."""
        add_constant(self._graph, _STEP, tf.constant(0, tf.int64))
        add_constant(self._graph, _ANCHOR, tf.constant(0.0))
        for server, (key, number) in (calls or {}).items():
            name = self._sends["", server] = f"tensorwire/send/{len(self._sends)}"
            called = add_constant(self._graph, f"{name}/part", tf.constant(number, tf.int64))
            self._add_send(name, called, key, server, Carried(tf.int64, tf.TensorShape([])))
        for value, (source, targets) in self._crossing.sent.items():
            if self._me in targets:
                self._add_receive(value, source)
        for name, op in self._imported.ops.items():
            if self._runs(name):
                self._add_operator(op)
        for value, (source, targets) in self._crossing.sent.items():
            for target in targets if source == self._me else ():
                self._add_send_of(value, target)
        return self._part()

    def _runs(self, name: str) -> bool:
        found = self._crossing.runs.get(name)
        if found is None:  # it is there from the beginning
            return self._me in self._crossing.holds[name] and name not in self._received
        return self._me in found

    # ---- nodes

    def _end(self, key: str, side: Side, peer: str, carried: Carried) -> None:
        shape = None if carried.shape.rank is None else carried.shape.as_list()
        self._ends.append(PartEnd(key, side, peer, carried.dtype.name, shape))

    def _add_receive(self, value: str, source: str) -> None:
        carried = self._imported.carried(value)
        edge = edge_name(f"{value} of {self._name}", source, self._me)
        name = f"tensorwire/receive/{len(self._received)}"
        self._received[value] = name
        self._end(edge, "consumer", source, carried)
        node = self._graph.node.add(op=RECEIVE, name=name, input=[_ANCHOR, _STEP])
        if value in self._before:
            node.input.append("^" + self._sends[self._before[value]])
        node.attr["T"].type = carried.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(carried.shape.as_proto())
        node.attr["copy"].b = carried.varies
        node.attr["key"].s = self._key(edge).encode()

    def _add_send_of(self, value: str, target: str) -> None:
        source = value
        if value not in self._imported.ops and ":" not in value:  # that an operator has run
            source = f"{self._sends[value, target]}/ran"
            add_constant(self._graph, source, tf.zeros([0], tf.bool))
            self._graph.node[-1].input.append("^" + value.removesuffix(control_name("")))
        edge = edge_name(f"{value} of {self._name}", self._me, target)
        self._add_send(self._sends[value, target], source, edge, target, self._imported.carried(value))

    def _add_send(self, name: str, source: str, edge: str, target: str, carried: Carried) -> None:
        self._end(edge, "producer", target, carried)
        node = self._graph.node.add(op=SEND, name=name, input=[source, _STEP])
        node.attr["T"].type = carried.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(carried.shape.as_proto())
        node.attr["key"].s = self._key(edge).encode()

    def _key(self, edge: str) -> str:
        edges = operator_edges()
        return edges.operator_key(edge) if self._me == edges.member.name else edge  # a server is in one job

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

    # ---- the part

    def _part(self) -> GraphPart:
        there = {node.name for node in self._graph.node}
        given = {node.name for node in self._graph.node if node.op == "Placeholder"}  # what is small became constants
        captured = self._imported.captured
        arguments = [tensor for tensor in self._function.inputs if tensor.op.name not in captured]
        used = [number for number, tensor in enumerate(arguments) if tensor.op.name in given]
        gets = any(self._me in output.to for output in self._imported.graph.outputs)
        return GraphPart(
            self._graph.SerializeToString(deterministic=True),
            arguments=used,
            feeds=[arguments[number].name for number in used],
            captured=[name for name in captured if name in given],
            fetches=self._results() if gets else [],
            effects=[
                *self._sends.values(),
                *(op.name for op in self._function.graph.control_outputs if op.name in there),
            ],
            ends=self._ends,
        )

    def _results(self) -> list[str]:
        found = [(tensor.name, self._received.get(value_name(tensor))) for tensor in self._function.outputs]
        return [f"{received}:0" if received else name for name, received in found]
