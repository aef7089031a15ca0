"""The values that a graph returns in place of another worker's."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch

from tensorwire.errors import Unsupported
from tensorwire.torch.graph.placement.remote_tensor import reserve

Function = Callable[..., Any]


def kept_placeholder(traced: Any) -> Function:
    """``make()`` for a value that is kept for the backward graph: nobody reads it here, but autograd takes no None."""
    kept: Any = torch.empty(0, dtype=traced.dtype) if isinstance(traced, torch.Tensor) else 0
    return _called("kept_placeholder", lambda: kept)


def shown_placeholder(traced: torch.Tensor) -> Function:
    """``make(*lengths, *strides)`` for a value that people see: a tensor of that shape without memory."""
    rank, dtype = traced.dim(), traced.dtype

    def make(*numbers: int) -> torch.Tensor:
        return reserve(numbers[:rank], numbers[rank:], dtype)

    return _called("shown_placeholder", make)


def length_of(length: Any, known: Container[Any], me: str) -> tuple[list[Any], Function]:
    """The symbols that a length depends on, and ``evaluate(*their numbers)``.

    Raises `Unsupported` for one that depends on more than ``known``: on values that only another worker has.
    """
    expression = length.node.expr
    symbols = sorted(expression.free_symbols, key=str)
    if any(symbol not in known for symbol in symbols):
        raise Unsupported(
            f"an output of the graph has a length ({expression}) that {me} cannot know: use outputs='all', or compute "
            "what needs it inside the graph"
        )

    def evaluate(*numbers: int) -> int:
        return int(expression.xreplace(dict(zip(symbols, numbers, strict=True))))

    return symbols, _called("length", evaluate)


def _called(name: str, function: Function) -> Function:
    function.__name__ = name
    return function
