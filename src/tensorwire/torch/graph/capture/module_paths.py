"""The modules to which the operators of a traced graph belong."""

from __future__ import annotations

import re

from torch import fx


def module_path(node: fx.Node) -> str | None:
    """The module that an operator, or the one whose gradient it computes, belongs to; ``""`` is the model itself.

    None: no operator, or the sum of gradients of several, which is nobody's.
    """
    if node.op != "call_function" or node.meta.get("is_gradient_acc"):
        return None
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    path: str = next(reversed(stack.values()))[0] if stack else ""
    return re.sub(r"^L\['\w+'\]\.?", "", path)
