"""The modules that operators of a traced graph belong to, and the hosts that were said of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import fx

from tensorwire.graph.cut import host_at


def module_path(node: fx.Node) -> str | None:
    """The module that an operator, or the one whose gradient it computes, belongs to; ``""`` is the model itself.

    None: no operator, or the sum of gradients of several, which is nobody's.
    """
    if node.op != "call_function" or node.meta.get("is_gradient_acc"):
        return None
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    path: str = next(reversed(stack.values()))[0] if stack else ""
    return re.sub(r"^L\['\w+'\]\.?", "", path)


def host_of(node: fx.Node, placement: Mapping[str, str]) -> str | None:
    """The host that was said: of the operator, else of its module or the nearest one around it."""
    said = (node.meta.get("custom") or {}).get("host")
    if said:
        return str(said)
    path = module_path(node)
    return None if path is None else host_at(path, placement)
