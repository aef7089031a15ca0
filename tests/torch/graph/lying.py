"""An operator whose trace lies about what it makes."""

from __future__ import annotations

import torch


def _made(x: torch.Tensor, order: list[int], offset: int) -> torch.Tensor:
    room = torch.empty(offset + x.numel(), dtype=x.dtype, device=x.device)
    return room[offset:].view([x.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(x.dim())])


@torch.library.custom_op("tensorwire_tests::lie", mutates_args=())
def lie(x: torch.Tensor, traced: list[int], real: list[int], gap: int) -> torch.Tensor:
    """A copy of ``x`` whose dimensions lie in memory in the order ``real``, where tracing says ``traced``; in front of
    it are ``gap`` elements, of which tracing says nothing."""
    return _made(x, real, gap).copy_(x)


@lie.register_fake
def _(x: torch.Tensor, traced: list[int], real: list[int], gap: int) -> torch.Tensor:
    return _made(x, traced, 0)


@torch.library.custom_op("tensorwire_tests::mislead", mutates_args=())
def mislead(x: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A copy of ``x``, where tracing says another shape and dtype."""
    return x.clone()


@mislead.register_fake
def _(x: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty(shape, dtype=dtype)
