"""Shapes say of which kind an edge is."""

from __future__ import annotations

import pytest

from tensorwire.graph import TensorSpec, Unknown
from tensorwire.graph.kinds import BOUNDED, BY_VALUE, DYNAMIC, STATIC, VALUE, kind_of

bounded, unbounded = Unknown("s0", 100), Unknown("s1")


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (None, VALUE),
        (TensorSpec((), "float32"), VALUE),
        (TensorSpec((0, 1000), "float32"), VALUE),
        (TensorSpec((BY_VALUE,), "uint8"), VALUE),
        (TensorSpec((BY_VALUE + 1,), "uint8"), STATIC),
        (TensorSpec((1000,), "float32", (0,)), VALUE),  # one element
        (TensorSpec((2, 2), "float32", (1000, 1)), STATIC),  # with what lies between its rows
        (TensorSpec((bounded,), "float32"), BOUNDED),
        (TensorSpec((Unknown("s2", 1),), "uint8"), BOUNDED),  # as small as a value, but not always as long
        (TensorSpec((4, 4), "float32", (bounded, 1)), BOUNDED),
        (TensorSpec((4,), "float32", offset=bounded), BOUNDED),
        (TensorSpec((bounded, unbounded), "float32"), DYNAMIC),
        (TensorSpec((4, 4), "float32", (unbounded, 1)), DYNAMIC),
    ],
    ids=str,
)
def test_kind(spec: TensorSpec | None, kind: str) -> None:
    assert kind_of(spec) == kind
