"""From a traced function of TensorFlow to our graph: a node for each operator, and one for each of several outputs.

A control dependency between workers becomes a tensor, an empty one, that the first operator's worker sends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.graph.ir import INPUT, ITEM, PARAMETER, Graph, Node, Output, TensorSpec, Unknown, worker_name
from tensorwire.tensorflow.operator_edges import Carried
from tensorwire.tensorflow.placement import owner_of, rank_of

_CONTROL = "^"  # ends the name of a value that says that an operator has run
_TOKEN = TensorSpec((0,), "bool")


@dataclass(frozen=True)
class Imported:
    """A function's graph.

    ``ops``: what has to run, by name, in an order that is possible. ``waits``: by name, the operators that one waits
    for besides its operands. ``captured``: what was captured, by the name inside.
    """

    graph: Graph
    ops: dict[str, Any]
    waits: dict[str, list[Any]]
    captured: dict[str, Any]

    def carried(self, value: str) -> Carried:
        """What the edge of a value carries."""
        name, _, number = value.partition(":")
        if name not in self.ops:  # it says that an operator has run
            return Carried(tf.as_dtype(_TOKEN.dtype), tf.TensorShape(_TOKEN.shape))
        tensor = self.ops[name].outputs[int(number or 0)]
        return Carried(tensor.dtype, tensor.shape)


def value_name(tensor: Any) -> str:
    """What the graph calls a tensor: its operator, and its number where there are several."""
    return tensor.op.name if len(tensor.op.outputs) == 1 else str(tensor.name)


def control_name(op: str) -> str:
    """What the graph calls the value that says that an operator has run."""
    return op + _CONTROL


def import_function(function: Any, name: str, workers: int, crossing: Collection[str] = ()) -> Imported:
    """The graph of a concrete function.

    Args:
        function: The function.
        name: What plans and messages call it.
        workers: How many workers there are.
        crossing: The operators that others on other workers have to wait for.

    Returns:
        The graph, with what it came from.

    Raises:
        ArgumentError: It is placed on a worker that is not there, or an operator's variables are on several workers.
        Unsupported: It has what cannot cross or be cut.
    """
    captured = {inner.op.name: outer for outer, inner in function.graph.captures}
    results = {tensor.op.name for tensor in function.outputs if not tensor.consumers()}
    ops = _needed(function.graph)
    # A result need not wait for effects on other workers: these are over when the function returns there.
    waits = {name: [] if name in results else _waits_for(op) for name, op in ops.items()}
    nodes: list[Node] = []
    for name, op in ops.items():
        made = _nodes(op, [each.name for each in waits[name] if each.name in crossing], captured, workers)
        nodes += [*made, _token(made[0])] if name in crossing else made
    everyone = tuple(worker_name(rank) for rank in range(workers))
    outputs = {value_name(tensor): tensor for tensor in function.outputs}
    kept = tuple(Output(found, everyone, caller=True) for found in outputs)
    return Imported(Graph(name, everyone, tuple(nodes), kept), ops, waits, captured)


def _needed(graph: Any) -> dict[str, Any]:
    """What results and side effects need, each after what it needs itself; and the arguments."""
    found: dict[str, Any] = {}
    waiting = [tensor.op for tensor in (*graph.inputs, *graph.outputs)] + _in_order(graph.control_outputs)
    waiting.reverse()
    while waiting:
        op = waiting[-1]
        before = [tensor.op for tensor in op.inputs] + _waits_for(op)
        missing = [each for each in before if each.name not in found]
        if missing and op.name not in found:
            waiting += reversed(missing)
            continue
        waiting.pop()
        if op.type != "NoOp":
            found.setdefault(op.name, op)
    return found


def _waits_for(op: Any) -> list[Any]:
    """The operators of its control dependencies; those that do nothing stand for theirs."""
    found: dict[str, Any] = {}
    waiting, seen = list(op.control_inputs), set()
    while waiting:
        each = waiting.pop()
        if each.name in seen:
            continue
        seen.add(each.name)
        if each.type == "NoOp":
            waiting += each.control_inputs
        else:
            found[each.name] = each
    return _in_order(found.values())


def _in_order(ops: Iterable[Any]) -> list[Any]:
    """As they were traced: TensorFlow keeps some in sets, whose order is another one on each worker."""
    return sorted(ops, key=lambda op: op._id)  # private to TensorFlow 2.21: operators count


def _nodes(op: Any, tokens: list[str], captured: dict[str, Any], workers: int) -> list[Node]:
    if op.type == "Placeholder":
        return [_given(op, captured, workers)]
    rank = _rank(op, captured)
    if rank is not None and rank >= workers:
        raise ArgumentError(f"{op.name} is on worker {rank}, and the job has {workers}: start more workers")
    # Tokens come first, because an operator that nobody placed follows its last operand.
    inputs = [*map(control_name, tokens), *map(value_name, op.inputs)]
    stateful, single = bool(op.op_def.is_stateful), len(op.outputs) == 1
    made = [
        Node(
            op.name,
            op.type,
            tuple(inputs),
            spec=_spec(op.outputs[0]) if single else None,
            worker=None if rank is None else worker_name(rank),
            fresh=True,
            cheap=rank is None and not stateful,
            random=stateful,
            tuple_=not single,
        )
    ]
    if not single:
        made += [
            Node(str(tensor.name), op.type, (op.name,), kind=ITEM, spec=_spec(tensor), index=number)
            for number, tensor in enumerate(op.outputs)
        ]
    return made


def _token(node: Node) -> Node:
    """What says that an operator has run."""
    return Node(control_name(node.name), "NoOp", (node.name,), spec=_TOKEN, worker=node.worker, fresh=True, random=True)


def _given(op: Any, captured: dict[str, Any], workers: int) -> Node:
    spec = _spec(op.outputs[0])
    if op.name not in captured:
        return Node(op.name, op.type, kind=INPUT, spec=spec)
    outer = captured[op.name]
    if outer.dtype != tf.resource:  # the same on all workers, which run the same program
        return Node(op.name, op.type, kind=PARAMETER, spec=spec)
    rank = owner_of(outer)
    if rank >= workers:
        raise ArgumentError(f"a variable is on worker {rank}, and the job has {workers}: start more workers")
    return Node(op.name, op.type, kind=PARAMETER, spec=None, present=(worker_name(rank),))


def _rank(op: Any, captured: dict[str, Any]) -> int | None:
    """The worker of an operator: that of its variables, else that of its device."""
    owners = {owner_of(captured[t.op.name]) for t in op.inputs if t.dtype == tf.resource and t.op.name in captured}
    if len(owners) > 1:
        ranks = " and ".join(map(str, sorted(owners)))
        raise ArgumentError(
            f"{op.name} ({op.type}) takes variables of workers {ranks}: an operator, such as a loop or a branch, runs "
            "on one worker"
        )
    inside = _inside(op)
    if inside - owners and len(inside | owners) > 1:
        ranks = " and ".join(map(str, sorted(inside | owners)))
        raise Unsupported(
            f"{op.name} ({op.type}) has operators of workers {ranks} in it: a loop, a branch or a called function runs "
            "on one worker"
        )
    return next(iter(owners or inside), None) if owners or inside else rank_of(op.device)


def _inside(op: Any) -> set[int]:
    """The workers that are named in the functions that an operator calls, at any depth."""
    names = [value.func.name for value in op.node_def.attr.values() if value.HasField("func")]
    found: set[int] = set()
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name in seen or not op.graph._is_function(name):
            continue
        seen.add(name)
        for node in op.graph._get_function(name).cached_definition.node_def:
            rank = rank_of(node.device)
            found |= set() if rank is None else {rank}
            names += [value.func.name for value in node.attr.values() if value.HasField("func")]
    return found


def _spec(tensor: Any) -> TensorSpec | None:
    """Dtype and shape, for plans; None for what they have no words for."""
    if tensor.dtype.name not in DTYPES or tensor.shape.rank is None:
        return None
    lengths = (Unknown("?") if length is None else int(length) for length in tensor.shape.as_list())
    return TensorSpec(tuple(lengths), tensor.dtype.name)
