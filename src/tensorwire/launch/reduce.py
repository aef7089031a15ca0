"""``job.all_reduce`` without the transfer: its types of values, and their combination.

Values are combined in the order of the ranks, element by element, so all workers get the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tensorwire.errors import ArgumentError
from tensorwire.launch.values import Bytes, Form, bytes_of, form_of

OPERATIONS = ("sum", "mean", "max", "min")
_TENSOR_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_WHAT = "job.all_reduce"


def flatten(value: Any, op: str) -> tuple[Form, Bytes]:
    """The form and the bytes of a worker's value. Raises `ArgumentError` for what cannot be reduced by ``op``."""
    if op not in OPERATIONS:
        raise ArgumentError(f"{_WHAT} takes op={', '.join(map(repr, OPERATIONS))}, not {op!r}")
    if type(value) in (bool, int, float):
        form, data = _number(value, op)
    elif found := form_of(value):
        form = found
        if form.kind == "tensor" and form.dtype not in _TENSOR_DTYPES:
            raise ArgumentError(f"{_WHAT} takes tensors of {', '.join(_TENSOR_DTYPES)}, not of {form.dtype}")
        if form.kind != "tensor" and value.dtype.kind not in "biuf":
            raise ArgumentError(f"{_WHAT} takes arrays of floats, integers and bools, not of {value.dtype}")
        data = bytes_of(value, _WHAT)
    else:
        raise ArgumentError(
            f"{_WHAT} takes int, float, bool, numpy arrays and torch tensors, not {type(value).__name__}"
        )
    _check(form, op)
    return form, data


def _number(value: float, op: str) -> tuple[Form, Bytes]:
    if type(value) is int and op == "mean":  # as Python's own division
        value = float(value)
    dtype = {bool: "|b1", int: "<i8", float: "<f8"}[type(value)]
    try:
        return Form(type(value).__name__, dtype, ()), np.array([value], dtype).view(np.uint8)
    except OverflowError:
        raise ArgumentError(f"{_WHAT} takes ints of up to 64 bits; {value} is larger: give a float") from None


def _check(form: Form, op: str) -> None:
    dtype = np.dtype(form.dtype).name if form.kind != "tensor" else form.dtype
    if dtype == "bool" and op not in ("max", "min"):
        raise ArgumentError(f"{_WHAT} of bools takes op='max' (any) or op='min' (all); to count them, give int(value)")
    if "int" in dtype and op == "mean":
        raise ArgumentError(f"{_WHAT} takes the mean of floats: convert this {form} first")


def combine(form: Form, op: str, values: Sequence[Bytes]) -> Bytes:
    """The values of the workers, in the order of their ranks, as one. Raises `ArgumentError` for an int too large."""
    if form.kind == "int" and op == "sum":
        return _exact_sum(values)
    total: Bytes = values[0].copy()
    result, step = form.elements(total), _step(form, op)
    with np.errstate(over="ignore", invalid="ignore"):  # inf and nan are results, as in torch
        for other in values[1:]:
            step(result, form.elements(other))
        if op == "mean":
            result /= len(values)
    return total


def _exact_sum(values: Sequence[Bytes]) -> Bytes:
    total = sum(int(value.view("<i8")[0]) for value in values)
    return _number(total, "sum")[1]


def _step(form: Form, op: str) -> Callable[[Any, Any], object]:
    """A function that takes the second array into the first."""
    library: Any = sys.modules["torch"] if form.kind == "tensor" else np
    function = {"sum": library.add, "mean": library.add, "max": library.maximum, "min": library.minimum}[op]
    return lambda into, other: function(into, other, out=into)
