"""A step of Gluon's Trainer or of a Module updates all parameters, or later steps raise `StepInterrupted`.

Both call the store for one parameter after another. Private to MXNet 1.9.1: `Trainer._allreduce_grads` and `._update`,
`model._update_params` and `._update_params_on_kvstore`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mxnet as mx

from tensorwire.mxnet.kvstore import KVStore


def watch() -> None:
    """Steps are units, and so are the halves of Trainer's, for those who call these by themselves."""
    trainer, module = mx.gluon.Trainer, mx.module.module
    for name in ("_allreduce_grads", "_update", "step"):
        setattr(trainer, name, _whole(getattr(trainer, name)))
    trainer.step = _checked_first(trainer.step)
    for name in ("_update_params", "_update_params_on_kvstore"):
        setattr(module, name, _whole(getattr(module, name)))


def _whole(call: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(call)
    def whole(*arguments: Any, **options: Any) -> None:
        given = (getattr(each, "_kvstore", each) for each in (*arguments, *options.values()))
        store = next((each for each in given if isinstance(each, KVStore)), None)
        if store is None:
            call(*arguments, **options)
            return
        stale = None
        with store.unit("a step"):
            try:
                call(*arguments, **options)
            except UserWarning as warning:  # of a gradient that backward has not written, before any update
                stale = warning
        if stale is not None:
            raise stale

    return whole


def _checked_first(step: Callable[..., None]) -> Callable[..., None]:
    """What Trainer would refuse in the middle is refused before a part of the step has left."""

    @functools.wraps(step)
    def checked_first(trainer: Any, batch_size: Any, *arguments: Any, **options: Any) -> None:
        trainer._check_and_rescale_grad(trainer._scale / batch_size)  # first: MXNet's own stores keep this scale
        if not trainer._kv_initialized:
            trainer._init_kvstore()
        if trainer._params_to_init:
            trainer._init_params()
        if isinstance(trainer._kvstore, KVStore):
            for param in trainer._params:
                if param.grad_req != "null":
                    param.list_grad()
        step(trainer, batch_size, *arguments, **options)

    return checked_first


watch()
