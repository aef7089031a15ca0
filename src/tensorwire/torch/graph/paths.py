"""The modules that operators of a traced graph belong to, and their hosts while a model is placed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import fx, nn

from tensorwire.torch.graph.hosting import Scope
from tensorwire.torch.graph.placement import forget, register, spot_of


def module_path(node: fx.Node) -> str | None:
    """The module that an operator, or the one whose gradient it computes, belongs to; ``""`` is the model itself.

    None: no operator, or the sum of gradients of several, which is nobody's.
    """
    if node.op != "call_function" or node.meta.get("is_gradient_acc"):
        return None
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    path: str = next(reversed(stack.values()))[0] if stack else ""
    return re.sub(r"^L\['\w+'\]\.?", "", path)


@contextmanager
def placed(model: nn.Module, hosts: Mapping[str, str]) -> Iterator[Scope]:
    """While ``model`` is placed so, the hosts of its nodes, as they are when it runs.

    Raises `ArgumentError` for what is no module of it.
    """
    register(model, hosts)
    try:
        yield Scope(spot_of(model))
    finally:
        forget(model)


def host_of(scope: Scope, node: fx.Node, *, backward: bool) -> str | None:
    """The host that was said of a node. Sums of gradients belong to no module: they are where their operands are."""
    return None if backward and node.meta.get("is_gradient_acc") else scope.host_of(node)
