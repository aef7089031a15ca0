"""Hooks on the gradients of other workers' parameters, which have no gradient here to call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _WithGradient:
    """A hook that is called only where there is a gradient: its argument, or that of its argument."""

    def __init__(self, hook: Callable[..., Any], *, accumulated: bool) -> None:
        self._hook, self._accumulated = hook, accumulated

    def __call__(self, given: Any) -> Any:
        gradient = given.grad if self._accumulated else given
        return None if gradient is None else self._hook(given)


def only_with_gradient(parameter: torch.Tensor) -> None:
    """Lets the hooks that ``parameter`` has by now be called only where it has a gradient. Idempotent."""
    any_: Any = parameter
    with torch._C.DisableTorchFunctionSubclass():
        before, after = any_._backward_hooks, any_._post_accumulate_grad_hooks
    for hooks, accumulated in ((before, False), (after, True)):
        for key, hook in (hooks or {}).items():
            if not isinstance(hook, _WithGradient):
                hooks[key] = _WithGradient(hook, accumulated=accumulated)
