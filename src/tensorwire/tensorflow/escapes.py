"""Which received tensors outlive the call of their function: these are copied, so that their slots come back.

A received tensor is the memory of a slot. Returned, assigned to a variable or put into a list, it would keep the slot,
and the sender would wait for it. Operators that may hand on the memory of an input are looked through.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

RECEIVE, SEND = "TensorwireReceive", "TensorwireSend"
# These return the memory of an input, or a part of it; some of them only where there is nothing to do.
# fmt: off
_HAND_ON = frozenset((
    "AddN", "All", "Any", "Bitcast", "BroadcastTo", "Cast", "CheckNumerics", "CheckNumericsV2", "ConcatV2", "Enter",
    "EnsureShape", "Exit", "ExpandDims", "Identity", "IdentityN", "Max", "Mean", "Merge", "Min", "NextIteration",
    "Pad", "PadV2", "PlaceholderWithDefault", "PreventGradient", "Prod", "RefIdentity", "Reshape", "Reverse",
    "ReverseV2", "Roll", "Slice", "Snapshot", "Split", "SplitV", "Squeeze", "StopGradient", "StridedSlice", "Sum",
    "Switch", "Tile", "Transpose", "Unpack",
))
# fmt: on


def copy_what_escapes(graph: Any) -> None:
    """Sets ``copy`` of the receives of a graph whose tensors may outlive a call."""
    outputs = {id(tensor) for tensor in graph.outputs}
    for op in graph.get_operations():
        if op.type == RECEIVE and not op.get_attr("copy") and _escapes(op.outputs[0], outputs):
            op._set_attr("copy", tf.compat.v1.AttrValue(b=True))


def when_traced(graph: Any) -> None:
    """Calls `copy_what_escapes` when all of the graph has been traced.

    Private to TensorFlow 2.21: `FuncGraph._add_scope_exit_callback`, which calls after the outputs are known.
    """
    if not getattr(graph, "_tensorwire_escapes", False):
        graph._tensorwire_escapes = True
        graph._add_scope_exit_callback(lambda: copy_what_escapes(graph))


def _escapes(tensor: Any, outputs: set[int]) -> bool:
    waiting, seen = [tensor], set()
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if id(found) in outputs:
            return True
        for op in found.consumers():
            if op.type in _HAND_ON:
                waiting += op.outputs
            elif op.type != SEND and _keeps(op):
                return True
    return False


def _keeps(op: Any) -> bool:
    """Whether an operator may keep its inputs' memory, or hand it to a function: nothing is known of it then."""
    definition = op.op_def
    return (
        definition.is_stateful
        or any(tensor.dtype in (tf.variant, tf.resource) for tensor in op.outputs)
        or any(attribute.type in ("func", "list(func)") for attribute in definition.attr)
    )
