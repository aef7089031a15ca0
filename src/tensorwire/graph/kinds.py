"""The kind of an edge, from the shape of its tensor."""

from __future__ import annotations

from tensorwire.graph.ir import TensorSpec

STATIC = "static"  # shape known before the graph runs
BOUNDED = "bounded"  # it varies, and cannot be more than some size
DYNAMIC = "dynamic"  # only the rank is known
VALUE = "value"  # a number, or a tensor so small that it travels by value, with its signal
BY_VALUE = 64  # bytes; up to here a tensor is as cheap as its address
SMALL = 64 * 2**10  # bytes; outputs of a graph up to here reach every worker
MOST_DIMENSIONS = 8  # of a tensor whose shape varies, as its shape is sent in front of it


def kind_of(spec: TensorSpec | None) -> str:
    """The kind of the edge that a tensor of ``spec`` crosses by; None: a number."""
    if spec is None:
        return VALUE
    nbytes = spec.nbytes
    if nbytes is None:
        return DYNAMIC
    if not spec.static:
        return BOUNDED
    return VALUE if nbytes <= BY_VALUE else STATIC
