"""Checks MXNet's choice of a store, so that no script trains without one unnoticed.

With one device, MXNet silently uses no store for any name without "dist".
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import mxnet as mx

from tensorwire.errors import ArgumentError
from tensorwire.launch.worker import current_worker

_OURS = "tensorwire"


def watch() -> None:
    """`mx.kv.create`, Trainer and Module check what they are given. Private to MXNet 1.9.1: `_create_kvstore`."""
    mx.kv.create = _named(mx.kv.create)
    for module in (mx.model, mx.gluon.trainer, mx.module.module):
        module._create_kvstore = _checked(module._create_kvstore)
    trainer = mx.gluon.Trainer
    trainer._check_and_rescale_grad = _rescaled(trainer._check_and_rescale_grad)


def _check_name(kvstore: Any) -> None:
    known = sorted(name for name in mx.kvstore.KVStoreBase.kv_registry if _OURS in name)
    if isinstance(kvstore, str) and _OURS in kvstore.lower() and kvstore.lower() not in known:
        raise ArgumentError(f"there is no store {kvstore!r:.100}; there are {', '.join(known)}")


def _named(create: Callable[..., Any]) -> Callable[..., Any]:
    """MXNet takes a name that it does not know for one of its own local stores."""

    @functools.wraps(create)
    def named(name: Any = "local") -> Any:
        _check_name(name)
        return create(name)

    return named


def _checked(create: Callable[..., tuple[Any, bool]]) -> Callable[..., tuple[Any, bool]]:
    @functools.wraps(create)
    def checked(kvstore: Any, *arguments: Any) -> tuple[Any, bool]:
        _check_name(kvstore)
        store, update_on_kvstore = create(kvstore, *arguments)
        if _OURS not in getattr(store, "type", ""):
            _warn(kvstore)
        return store, update_on_kvstore

    return checked


def _rescaled(check: Callable[..., None]) -> Callable[..., None]:
    """Trainer refuses another batch size, for MXNet's servers keep the first; ours get it with every push."""

    @functools.wraps(check)
    def rescaled(trainer: Any, scale: float) -> None:
        if _OURS in getattr(trainer._kvstore, "type", ""):
            trainer._optimizer.rescale_grad = scale
        else:
            check(trainer, scale)

    return rescaled


def _warn(kvstore: Any) -> None:
    try:
        workers = current_worker().num_workers
    except ArgumentError:
        return
    if workers > 1:
        warnings.warn(
            f"kvstore={kvstore!r:.100}: this worker trains by itself, and its job has {workers}; "
            'pass kvstore="dist_tensorwire_sync"',
            stacklevel=4,
        )


watch()
