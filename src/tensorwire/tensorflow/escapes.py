"""Which received tensors outlive the call of their function: these are copied, so that their slots become free.

A received tensor is the memory of a slot. If it is returned, assigned to a variable or put into a list, it keeps the
slot, and the sender waits for it. The search passes through operators that may return the memory of an input.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

RECEIVE, SEND = "TensorwireReceive", "TensorwireSend"
# These return the memory of an input, or a part of it.
# fmt: off
_HAND_ON = frozenset((
    "Bitcast", "CheckNumerics", "CheckNumericsV2", "Enter", "EnsureShape", "Exit", "ExpandDims", "Identity",
    "IdentityN", "Merge", "NextIteration", "PlaceholderWithDefault", "PreventGradient", "RefIdentity", "Reshape",
    "Slice", "Snapshot", "Split", "SplitV", "Squeeze", "StopGradient", "StridedSlice", "Switch", "Unpack",
))
# These do so where there is nothing to do: then the output has the input's dtype, and as many elements.
_IF_IDLE = frozenset((
    "AddN", "All", "Any", "BroadcastTo", "Cast", "ConcatV2", "Max", "Mean", "Min", "Pad", "PadV2", "Prod", "Reverse",
    "ReverseV2", "Roll", "Sum", "Tile", "Transpose",
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
            if op.type in _HAND_ON or (op.type in _IF_IDLE and _alike(found, op.outputs[0])):
                waiting += op.outputs
            elif op.type in _IF_IDLE:
                continue
            elif op.type != SEND and _keeps(op):
                return True
    return False


def _alike(one: Any, other: Any) -> bool:
    """Whether two tensors may have the same elements, as far as is known."""
    if one.dtype != other.dtype:
        return False
    counts = [tensor.shape.num_elements() for tensor in (one, other)]
    return None in counts or counts[0] == counts[1]


def _keeps(op: Any) -> bool:
    """Whether an operator may keep its inputs' memory, or hand it to a function: nothing is known of it then."""
    definition = op.op_def
    return (
        definition.is_stateful
        or any(tensor.dtype in (tf.variant, tf.resource) for tensor in op.outputs)
        or any(attribute.type in ("func", "list(func)") for attribute in definition.attr)
    )
