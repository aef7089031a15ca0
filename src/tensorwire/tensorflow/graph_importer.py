"""From a traced TensorFlow function to a graph: a node for each operator, and one for each of several outputs.

A control dependency between workers becomes an empty tensor that the first operator's worker sends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.graph.ir import INPUT, ITEM, PARAMETER, Graph, Node, Output, TensorSpec, Unknown
from tensorwire.tensorflow.operator_edges import Carried
from tensorwire.tensorflow.placement import member_of, owner_of

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


def import_function(
    function: Any, name: str, workers: Sequence[str], servers: Sequence[str], crossing: Collection[str] = ()
) -> Imported:
    """The graph of a concrete function.

    Args:
        function: The function.
        name: What plans and messages call it.
        workers: The workers. All of them have the arguments.
        servers: The servers. Those that the function names take part.
        crossing: The operators that others on other workers have to wait for.

    Returns:
        The graph, with what it came from.

    Raises:
        ArgumentError: It is placed where nobody is, or an operator's variables are in several places.
        Unsupported: It has what cannot cross or be cut.
    """
    captured = {inner.op.name: outer for outer, inner in function.graph.captures}
    results = {tensor.op.name for tensor in function.outputs if not tensor.consumers()}
    ops = _needed(function.graph)
    # A result need not wait for effects on other workers: these are over when the function returns there.
    waits = {name: [] if name in results else _waits_for(op) for name, op in ops.items()}
    places = {name: _place(op, captured) for name, op in ops.items()}
    for each, place in places.items():
        if place is not None and place not in (*workers, *servers):
            raise ArgumentError(_nowhere(each, ops[each].type, place, len(workers), len(servers)))
    used = tuple(server for server in servers if server in places.values())
    given = tuple(workers) if used else None  # which of all have the arguments
    nodes: list[Node] = []
    for each, op in ops.items():
        if op.type == "Placeholder":
            nodes.append(_given(op, captured, places[each], given))
            continue
        made = _nodes(op, [before.name for before in waits[each] if before.name in crossing], places[each])
        nodes += [*made, _token(made[0])] if each in crossing else made
    outputs = {value_name(tensor): tensor for tensor in function.outputs}
    kept = tuple(Output(found, tuple(workers), caller=True) for found in outputs)
    return Imported(Graph(name, (*workers, *used), tuple(nodes), kept), ops, waits, captured)


def _nowhere(name: str, kind: str, place: str, workers: int, servers: int) -> str:
    what = "a variable" if kind == "Placeholder" else name
    role = place.partition(" ")[0]
    return (
        f"{what} is on {place}, and the job has {workers if role == 'worker' else servers} of them: start more {role}s"
    )


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


def _nodes(op: Any, tokens: list[str], place: str | None) -> list[Node]:
    # Tokens come first, because an operator that nobody placed follows its last operand.
    inputs = [*map(control_name, tokens), *map(value_name, op.inputs)]
    stateful, single = bool(op.op_def.is_stateful), len(op.outputs) == 1
    made = [
        Node(
            op.name,
            op.type,
            tuple(inputs),
            spec=_spec(op.outputs[0]) if single else None,
            worker=place,
            fresh=True,
            cheap=place is None and not stateful,
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


def _given(op: Any, captured: dict[str, Any], place: str | None, given: tuple[str, ...] | None) -> Node:
    spec = _spec(op.outputs[0])
    if op.name not in captured:
        return Node(op.name, op.type, kind=INPUT, spec=spec, present=given)
    if place is None:  # the same on all workers, which run the same program
        return Node(op.name, op.type, kind=PARAMETER, spec=spec, present=given)
    return Node(op.name, op.type, kind=PARAMETER, spec=None, present=(place,))


def _place(op: Any, captured: dict[str, Any]) -> str | None:
    """Where an operator runs: where its variables are, else where its device says. Where a captured variable is."""
    if op.type == "Placeholder":
        outer = captured.get(op.name)
        return None if outer is None or outer.dtype != tf.resource else owner_of(outer)
    owners = {owner_of(captured[t.op.name]) for t in op.inputs if t.dtype == tf.resource and t.op.name in captured}
    if len(owners) > 1:
        raise ArgumentError(
            f"{op.name} ({op.type}) takes variables of {' and '.join(sorted(owners))}: an operator, such as a loop or "
            "a branch, runs in one place"
        )
    inside = _inside(op)
    if inside - owners and len(inside | owners) > 1:
        raise Unsupported(
            f"{op.name} ({op.type}) has operators of {' and '.join(sorted(inside | owners))} in it: a loop, a branch "
            "or a called function runs in one place"
        )
    return next(iter(owners or inside)) if owners or inside else member_of(op.device)


def _inside(op: Any) -> set[str]:
    """The workers and servers that are named in the functions that an operator calls, at any depth."""
    names = [value.func.name for value in op.node_def.attr.values() if value.HasField("func")]
    found: set[str] = set()
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name in seen or not op.graph._is_function(name):
            continue
        seen.add(name)
        for node in op.graph._get_function(name).cached_definition.node_def:
            member = member_of(node.device)
            found |= set() if member is None else {member}
            names += [value.func.name for value in node.attr.values() if value.HasField("func")]
    return found


def _spec(tensor: Any) -> TensorSpec | None:
    """Dtype and shape, for plans; None for what they have no words for."""
    if tensor.dtype.name not in DTYPES or tensor.shape.rank is None:
        return None
    lengths = (Unknown("?") if length is None else int(length) for length in tensor.shape.as_list())
    return TensorSpec(tuple(lengths), tensor.dtype.name)
