"""Functions as rules: an optimizer that calls one for each parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensorwire.store.foreign import imported

_NOT_OPTIONS = ("params", "param_names", "function")


class FunctionOptimizer(torch.optim.Optimizer):
    """Calls ``function(parameter, gradient, state, options)`` for each parameter with a gradient.

    Args:
        params: Parameters or groups, as for every optimizer of torch.
        function: Its import path, which stands in the groups, so that a copy or a pickle knows it.
        **options: What it gets as ``options``, a dictionary; groups may have others.
    """

    def __init__(self, params: Any, function: str, **options: Any) -> None:
        super().__init__(params, {"function": function, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One call for each parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            function: Any = imported(group["function"])
            options = {k: v for k, v in group.items() if k not in _NOT_OPTIONS}
            for p in group["params"]:
                if p.grad is not None:
                    function(p, p.grad, self.state[p], options)
        return loss
