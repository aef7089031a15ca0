"""What scripts report of their training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tensorwire.errors import ArgumentError
from tensorwire.observe.scalars import MOST_NAMES, Scalars, ScalarSnapshot


@pytest.fixture
def scalars() -> Iterator[Scalars]:
    return Scalars()


def test_steps_and_samples_count_and_values_are_the_latest(scalars: Scalars) -> None:
    assert scalars.report({"loss": 2.0}, step=None, total=100, samples=8) == (1, {"loss": 2.0})
    assert scalars.report({"accuracy": 1}, step=None, total=None, samples=8) == (2, {"accuracy": 1.0})
    assert scalars.report({"loss": 1.0}, step=10, total=None, samples=None) == (10, {"loss": 1.0})
    assert scalars.snapshot() == ScalarSnapshot(10, 100, 16, {"loss": 1.0, "accuracy": 1.0})
    scalars.clear()
    assert scalars.snapshot() == ScalarSnapshot()


@pytest.mark.parametrize(
    "value",
    [3, True, 1.5, np.float32(1.5), np.ones(1), torch.tensor(2), torch.ones(1, 1, requires_grad=True) * 2],
    ids=repr,
)
def test_numbers(scalars: Scalars, value: Any) -> None:
    _, found = scalars.report({"value": value}, step=None, total=None, samples=None)
    assert type(found["value"]) is float
    assert found["value"] == float(value.detach() if isinstance(value, torch.Tensor) else np.asarray(value).item())


@pytest.mark.parametrize(
    ("values", "counts", "why"),
    [
        ({"loss": "low"}, {}, "loss is one number, not a str"),
        ({"loss": None}, {}, "loss is one number, not a NoneType"),
        ({"loss": torch.ones(3)}, {}, r"loss is one number, not a Tensor of shape \[3\]"),
        ({"loss": np.ones((2, 2))}, {}, r"loss is one number, not a ndarray of shape \[2, 2\]"),
        ({"loss": 10**400}, {}, "loss is one number, not a int"),
        ({}, {"samples": -1}, "samples is a whole number, 0 or more, not -1"),
        ({}, {"total": 1.5}, "total is a whole number"),
        ({}, {"step": 2**63}, "step is a whole number"),
        ({"a" * 65: 1}, {}, "names of 64 bytes at most"),
        ({"a\n": 1}, {}, "printable names"),
        ({"\ud800": 1}, {}, "printable names"),
        ({str(n): n for n in range(MOST_NAMES + 1)}, {}, f"takes {MOST_NAMES} printable names"),
    ],
)
def test_what_is_no_number_is_refused(
    scalars: Scalars, values: dict[str, Any], counts: dict[str, Any], why: str
) -> None:
    with pytest.raises(ArgumentError, match=why):
        scalars.report(values, **{"step": None, "total": None, "samples": None, **counts})
    assert scalars.snapshot() == ScalarSnapshot()
