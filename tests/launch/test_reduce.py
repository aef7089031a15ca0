"""How the values of several workers become one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tensorwire.errors import ArgumentError
from tensorwire.launch.reduce import combine, flatten


def reduced(op: str, *values: Any) -> Any:
    flat = [flatten(value, op) for value in values]
    assert len({form for form, _ in flat}) == 1
    return flat[0][0].value(combine(flat[0][0], op, [data.copy() for _, data in flat]))


@pytest.mark.parametrize(
    ("op", "values", "wanted"),
    [
        ("sum", (1, 2, 4), 7),
        ("sum", (2**62, -(2**62)), 0),
        ("sum", (0.1, 0.2, 0.3), 0.1 + 0.2 + 0.3),
        ("mean", (1, 2), 1.5),
        ("mean", (1, 2.0), 1.5),
        ("max", (3, 5, 4), 5),
        ("min", (3.5, 2.5), 2.5),
        ("max", (False, True), True),
        ("min", (False, True), False),
    ],
)
def test_numbers(op: str, values: tuple[Any, ...], wanted: Any) -> None:
    found = reduced(op, *values)
    assert (type(found), found) == (type(wanted), wanted)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_arrays_in_the_order_of_the_ranks(op: str, dtype: type[np.floating[Any]]) -> None:
    values = [np.random.default_rng(i).standard_normal((3, 5)).astype(dtype).T for i in range(3)]
    numpy = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}[op]
    wanted = numpy(numpy(values[0], values[1]), values[2])
    if op == "mean":
        wanted /= dtype(3)
    found = reduced(op, *values)
    assert found.dtype == dtype
    assert found.tobytes() == wanted.tobytes()
    scalar = reduced(op, *(value[1, 2] for value in values))
    assert type(scalar) is dtype
    assert scalar == wanted[1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_tensors(dtype: torch.dtype) -> None:
    values = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) * 9).abs().to(dtype) for i in range(3)]
    assert torch.equal(reduced("sum", *values), values[0] + values[1] + values[2])
    assert torch.equal(reduced("max", *values), torch.stack(values).amax(0))
    if dtype.is_floating_point:
        assert torch.equal(reduced("mean", *values), (values[0] + values[1] + values[2]) / 3)


def test_small_shapes_and_values_that_are_no_numbers() -> None:
    assert reduced("sum", torch.tensor(2.0, requires_grad=True), torch.tensor(3.0)).item() == 5.0
    assert reduced("sum", torch.zeros(0), torch.zeros(0)).shape == (0,)
    assert reduced("min", torch.tensor([True, True]), torch.tensor([True, False])).tolist() == [True, False]
    assert math.isnan(reduced("max", 1.0, math.nan))
    assert math.isnan(reduced("max", math.nan, 1.0))
    assert reduced("sum", np.float16(60000), np.float16(60000)) == np.inf


def test_a_value_is_left_as_it_is() -> None:
    values = [torch.ones(3), torch.ones(3)]
    reduced("sum", *values)
    assert values[0].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("value", "op", "why"),
    [
        ("text", "sum", "not str"),
        ([1, 2], "sum", "not list"),
        (None, "sum", "not NoneType"),
        (1, "product", "'sum', 'mean', 'max', 'min', not 'product'"),
        (True, "sum", r"give int\(value\)"),
        (torch.tensor([True]), "mean", r"give int\(value\)"),
        (np.arange(3), "mean", "mean of floats"),
        (torch.arange(3), "mean", r"mean of floats: convert this int64 tensor \[3\] first"),
        (2**63, "sum", "ints of up to 64 bits"),
        (np.array(["a"]), "max", "not of <U1"),
        (np.ones(2, complex), "sum", "not of complex128"),
        (torch.ones(2, dtype=torch.complex64), "sum", "not of complex64"),
        (torch.ones(2).to(torch.float8_e5m2), "sum", "not of float8_e5m2"),
        (torch.ones(2, device="meta"), "sum", "cannot carry a tensor on meta"),
    ],
)
def test_what_cannot_be_reduced_is_refused(value: Any, op: str, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        flatten(value, op)
    with pytest.raises(ArgumentError, match="larger: give a float"):
        reduced("sum", 2**62, 2**62)
