"""Memory that tensors lie in: where it may be, and what it looks like to torch."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import ArgumentError
from tensorwire.torch.graph.memory.birthplace import Birthplace
from tensorwire.torch.graph.memory.target import MemoryTarget, over
from tests.torch.graph.rooms import place, room

PROPERTY = settings(derandomize=True, database=None, deadline=None)
aten = torch.ops.aten


def test_where_a_place_may_be() -> None:
    for owner, options, what in [
        (b"x" * 64, {}, "writable"),
        (object(), {}, "which object lacks"),
        (memoryview(bytearray(128))[::2], {}, "contiguous"),
        (place(128).owner, {"offset": 1}, "multiple of 64"),
        (place(128).owner, {"offset": 64, "nbytes": 65}, "not lie within"),
        (place(128).owner, {"offset": -64}, "not lie within"),
        (place(128).owner, {"offset": 129}, "not lie within"),
        (place(128).owner, {"nbytes": -1}, "not lie within"),
    ]:
        arguments: dict[str, Any] = options
        with pytest.raises(ArgumentError, match=what):
            MemoryTarget(owner, **arguments)
    where = MemoryTarget(place(256).owner, offset=64, nbytes=128)
    result, _ = Birthplace(aten.ones.default)([where], ([32],))
    assert where.owner.tolist() == [0xEE] * 64 + result.untyped_storage().tolist() + [0xEE] * 64


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_lies_over_memory(name: str) -> None:
    dtype, owner = getattr(torch, name), room(256)
    owner[:] = 1
    tensor = over(owner, dtype=dtype, shape=(2, 3), offset=64)
    assert (tensor.dtype, tensor.shape, tensor.stride()) == (dtype, (2, 3), (3, 1))
    assert tensor.data_ptr() == owner.ctypes.data + 64
    tensor.zero_()
    assert owner.tolist() == [1] * 64 + [0] * 6 * DTYPES[name] + [1] * (192 - 6 * DTYPES[name])


@PROPERTY
@given(st.data())
def test_any_strides_lie_as_in_other_memory(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
    order = data.draw(st.permutations(range(len(shape))))
    like = torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
    tensor = over(room(4 * max(1, like.numel())), dtype=like.dtype, shape=like.shape, strides=like.stride())
    assert (tensor.shape, tensor.stride()) == (like.shape, like.stride())
    assert torch.equal(tensor.copy_(like), like)


def test_a_tensor_over_memory_is_nobodys_view_and_keeps_the_owner() -> None:
    owner = room(256)
    alive = weakref.ref(owner)
    tensor = over(owner, dtype=torch.float32, shape=(4, 4), strides=(1, 4))
    del owner
    assert not tensor._is_view()
    alias = tensor[1:]
    del tensor
    assert alive() is not None
    del alias
    assert alive() is None


def test_what_no_tensor_lies_over() -> None:
    for owner, options, what in [
        (b"1234", {"shape": (1,)}, "writable"),
        (room(8), {"shape": (3,)}, "not lie within the 8 bytes"),
        (room(8), {"shape": (2,), "strides": (2,)}, "not lie within"),
        (room(8), {"shape": (2,), "offset": 4}, "not lie within"),
        (room(8), {"shape": (1,), "offset": -4}, "not lie within"),
        (7, {"shape": (1,)}, "which int lacks"),
        (room(8), {"shape": (-1,)}, "none negative"),
        (room(8), {"shape": (2,), "strides": (-1,)}, "none negative"),
        (room(8), {"shape": (2,), "strides": (1, 1)}, "as many strides"),
    ]:
        arguments: dict[str, Any] = options
        with pytest.raises(ArgumentError, match=what):
            over(owner, dtype=torch.float32, **arguments)
