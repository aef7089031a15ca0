"""The graph itself: what it refuses, and how long a tensor is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorwire.errors import ArgumentError
from tensorwire.graph import TensorSpec, Unknown
from tests.graph.sketch import Sketch


def twice(s: Sketch) -> None:
    s.op("x")
    s.op("x")


def early(s: Sketch) -> None:
    s.op("x", "y")
    s.op("y")


def early_alias(s: Sketch) -> None:
    s.add("x", "view", alias="y")


def nowhere(s: Sketch) -> None:
    s.op("x", on="c")


def no_output(s: Sketch) -> None:
    s.out("x")


def sent_nowhere(s: Sketch) -> None:
    s.op("x")
    s.out("x", "c")


def held_nowhere(s: Sketch) -> None:
    s.parameter("x", on="ac")


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (twice, "node 'x' is there twice"),
        (early, "node 'x' uses 'y' before it is there"),
        (early_alias, "node 'x' uses 'y' before it is there"),
        (nowhere, "node 'x' is for c, and the job has a, b: name one of these"),
        (no_output, "there is no node 'x' to output"),
        (sent_nowhere, "output 'x' is for c, and the job has a, b: name one of these"),
        (held_nowhere, "node 'x' is for c, and the job has a, b: name one of these"),
    ],
)
def test_a_graph_that_cannot_be_is_refused(write: Callable[[Sketch], None], why: str) -> None:
    sketch = Sketch()
    write(sketch)
    with pytest.raises(ArgumentError, match=f"graph sketch: {why}"):
        sketch.graph()


@pytest.mark.parametrize(
    ("spec", "elements", "nbytes"),
    [
        (TensorSpec((), "float32"), 1, 4),
        (TensorSpec((3, 4), "bfloat16"), 12, 24),
        (TensorSpec((0, 4), "float32", (4, 1)), 0, 0),
        (TensorSpec((3, 4), "float32", (1, 3)), 12, 48),  # transposed
        (TensorSpec((3, 4), "float32", (8, 1)), 12, 80),  # a part of rows of 8
        (TensorSpec((1000,), "float32", (0,)), 1000, 4),  # one element, shown 1000 times
        (TensorSpec((Unknown("s", 5), 4), "int64", (4, 1)), 20, 160),
        (TensorSpec((Unknown("s"), 4), "int64", (4, 1)), None, None),
        (TensorSpec((2, 4), "int64", (Unknown("s"), 1)), 8, None),
    ],
    ids=str,
)
def test_how_long_a_tensor_is(spec: TensorSpec, elements: int | None, nbytes: int | None) -> None:
    assert (spec.elements, spec.nbytes) == (elements, nbytes)


def test_dtypes_and_strides_that_no_edge_carries_are_refused() -> None:
    with pytest.raises(ArgumentError, match="not 'object'"):
        TensorSpec((1,), "object")
    with pytest.raises(ArgumentError, match="a tensor of 2 dimensions has as many strides, not 1"):
        TensorSpec((1, 2), "float32", (1,))
