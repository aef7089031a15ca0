"""Moves the gradients of Gluon's parameters into the slots that pushes send from, so that backward writes there.

A network hybridized with ``static_shape`` writes to the arrays that its parameters had when MXNet built it. This module
notes networks as MXNet builds them, and builds them anew after their gradients have moved.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import mxnet as mx

_built: weakref.WeakSet[Any] = weakref.WeakSet()


def _note_networks() -> None:
    """Private to MXNet 1.9.1: `HybridBlock._build_cache` builds a network."""
    build = mx.gluon.HybridBlock._build_cache

    @functools.wraps(build)
    def noted(block: Any, *arguments: Any) -> None:
        build(block, *arguments)
        _built.add(block)

    mx.gluon.HybridBlock._build_cache = noted


def move(param: Any, slot: Any) -> bool:
    """Moves the gradient of a parameter into ``slot``, if it can be there. Returns whether it was moved now."""
    if param.grad_req == "null" or param._grad_stype != "default" or len(param.list_ctx()) > 1:
        return False
    (data,), (gradient,) = param.list_data(), param.list_grad()
    if gradient is slot or (gradient.shape, gradient.dtype) != (slot.shape, slot.dtype):
        return False
    fresh = data._fresh_grad
    gradient.copyto(slot)
    with mx.autograd.pause():
        mx.autograd.mark_variables([data], [slot], param.grad_req)
    data._fresh_grad = fresh
    param._grad[0] = slot
    return True


def build_anew(params: list[Any]) -> None:
    """Networks that have these parameters are built anew when they are called next."""
    for block in list(_built):
        if any(param in params for param in block.collect_params().values()):
            block._clear_cached_op()
            _built.discard(block)


_note_networks()
