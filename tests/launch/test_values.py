"""Values of Python as bytes, and what cannot become any."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tensorwire.errors import ArgumentError, ProtocolError
from tensorwire.launch.values import MOST_DEPTH, pack, unpack


def through(value: Any, *, writable: bool = True) -> Any:
    packed = pack(value, "test")
    data = np.empty(packed.nbytes, np.uint8)
    packed.write(data)
    data.flags.writeable = writable
    return unpack(data, len(packed.tree))


def same(one: Any, other: Any) -> bool:
    """Equal, and of equal types, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and np.shape(one) == np.shape(other) and bool(np.all(one == other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return bool(one == other)


PLAIN = [None, True, False, 0, -(2**63), 2**64 - 1, 1.5, float("inf"), "", "text", b"bytes", [], (), {}, OrderedDict()]
ARRAYS = [
    np.arange(6).reshape(2, 3).T,
    np.zeros((0, 3), np.float16),
    np.array(True),
    np.array(["a", "bc"]),
    np.array(["2026-01-01"], "datetime64[D]"),
    np.arange(3, dtype=">i4"),
    np.float32(1.5),
    np.int64(7),
    np.complex64(1 + 2j),
]
TENSORS = [
    torch.arange(6.0).reshape(2, 3).t(),
    torch.ones(3).expand(2, 3),
    torch.tensor(3),
    torch.tensor(True),
    torch.zeros(0, 4, dtype=torch.int16),
    torch.randn(5).to(torch.bfloat16),
    torch.randn(5).to(torch.float8_e4m3fn),
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.zeros(4)[::2],
]


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("value", [*PLAIN, *ARRAYS], ids=repr)
def test_values_survive(value: Any, writable: bool) -> None:
    assert same(through(value, writable=writable), value)


@pytest.mark.parametrize("value", TENSORS, ids=lambda t: f"{t.dtype} {list(t.shape)}")
def test_tensors_survive(value: torch.Tensor) -> None:
    found = through(value)
    assert found.dtype == value.dtype
    wide = torch.complex128 if value.is_complex() else torch.float64  # float8 compares nothing
    assert same(found.to(wide), value.to(wide))


def test_nested_values_survive_and_each_array_has_its_own_memory() -> None:
    nested = {"a": [1, (2.0, {"b": np.arange(3)}), torch.ones(2)], (1, "k"): {True: None}, 3: PLAIN}
    found = through(nested)
    assert same(found, nested)
    assert not np.shares_memory(found["a"][1][1]["b"], found["a"][2].numpy())
    found["a"][2][0] = 5
    state = torch.nn.Linear(2, 3).state_dict()
    assert same(through(state), state)


def test_a_parameter_arrives_as_a_plain_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    found = through([parameter, parameter.data])
    assert [type(t) for t in found] == [torch.Tensor] * 2
    assert not found[0].requires_grad


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({1, 2}, "test cannot carry set: it carries None, numbers"),
        ({"a": [0, object()]}, r"cannot carry object \(at \['a'\]\[1\]\)"),
        (Colour.RED, "Colour"),
        (Point(1, 2), "Point"),
        (defaultdict(int), "collections.defaultdict"),
        (lambda: 0, "function"),
        (np.array([None]), "an array of dtype object"),
        (np.zeros(2, [("a", "i4")]), "an array of dtype"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (torch.ones(2).to_sparse(), "a tensor of layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), r"a tensor on meta: send tensor.cpu\(\)"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (2**64, "ints of up to 64 bits"),
        ("\ud800", "text that UTF-8 can encode"),
    ],
)
def test_anything_else_is_refused_by_name(value: Any, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        pack(value, "test")


def test_a_cycle_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ArgumentError, match=f"nested up to {MOST_DEPTH} deep"):
        pack(cycle, "test")


def test_bytes_that_are_no_value_are_refused() -> None:
    packed = pack({"a": np.arange(100), "b": torch.ones(3)}, "test")
    data = np.empty(packed.nbytes, np.uint8)
    packed.write(data)
    for wrong in (data[:-1], data[: len(packed.tree)], np.full(100, 0xC1, np.uint8), np.zeros(0, np.uint8)):
        with pytest.raises(ProtocolError, match="another worker sent a malformed value"):
            unpack(wrong, len(packed.tree))
    for tree in (["set", 1], ["tensor", "nn", 1], ["tensor", "float32", -1], ["array", "O", 1], ["array"], [[]]):
        form = msgspec.msgpack.encode([1, tree])
        with pytest.raises(ProtocolError, match="another worker sent a malformed value"):
            unpack(np.frombuffer(form, np.uint8), len(form))
