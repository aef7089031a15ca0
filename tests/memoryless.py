"""Tensors of torch that say they are on the CPU, and have no memory there that could be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

COUNT = 10_000  # of float32, in each of them


def fake(count: int = COUNT) -> torch.Tensor:
    """What stands for a tensor while torch traces."""
    made: torch.Tensor = FakeTensorMode().from_tensor(torch.zeros(count))
    return made


def _functional() -> Any:
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(torch.zeros(COUNT))


def _resized(nbytes: int) -> torch.Tensor:
    """Its storage was cut behind its back, as libraries do that shard parameters."""
    tensor = torch.zeros(COUNT)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


class _Wrapper(torch.Tensor):
    """What torch calls a wrapper subclass, such as DTensor."""

    @staticmethod
    def __new__(cls) -> _Wrapper:
        made: _Wrapper = torch.Tensor._make_wrapper_subclass(cls, (COUNT,), dtype=torch.float32)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


WITHOUT_MEMORY: dict[str, Callable[[], Any]] = {
    "fake": fake,
    "meta": lambda: torch.zeros(COUNT, device="meta"),
    "functional": lambda: torch._to_functional_tensor(torch.zeros(COUNT)),  # type: ignore[attr-defined]
    "functional in Python": _functional,
    "wrapper": _Wrapper,
    "freed": lambda: _resized(0),
    "cut": lambda: _resized(8),
    "sparse": lambda: torch.zeros(COUNT).to_sparse(),
}
