"""Random numbers as in one process: each worker also draws, and discards, those of other workers' operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tensorwire.errors import Unsupported


def replay(node: fx.Node) -> Callable[[], None]:
    """``draw()`` that moves torch's generator on as far as the operator ``node`` does. It costs what that costs.

    Raises `Unsupported` for an operator whose shapes vary.
    """
    op: Any = node.target
    args = fx.map_arg(node.args, lambda operand: _like(operand, node))
    kwargs = fx.map_arg(node.kwargs, lambda operand: _like(operand, node))
    shapes: Any = (args, kwargs)

    def draw() -> None:
        made = torch.utils._pytree.tree_map_only(_Shape, _Shape.make, shapes)
        op(*made[0], **made[1])

    draw.__name__ = f"replay_{node.name}"
    return draw


class _Shape:
    """An operand whose values do not matter; zeros, as some operators refuse others."""

    def __init__(self, traced: torch.Tensor) -> None:
        self.shape, self.strides, self.dtype = tuple(traced.shape), traced.stride(), traced.dtype

    def make(self) -> torch.Tensor:
        """One."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype).zero_()


def _like(operand: fx.Node, of: fx.Node) -> Any:
    traced = operand.meta.get("val")
    if isinstance(traced, torch.Tensor):
        if all(isinstance(number, int) for number in (*traced.shape, *traced.stride())):
            return _Shape(traced)
    elif isinstance(traced, (int, float, bool)) and not isinstance(traced, (torch.SymInt, torch.SymFloat)):
        return traced
    raise Unsupported(f"options['replay_random']: {of.name} ({of.target}) has operands whose shape varies")
