"""The parameter store: sharding, buckets, push and pull, the servers' rules, and the training modes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tensorwire.store.modes import EASGD, SGD, SSP, Async, DiLoCo, LocalSGD, Sync

if TYPE_CHECKING:
    from tensorwire.keyvalue import Handle as Handle
    from tensorwire.keyvalue import KeyValue as KeyValue

__all__ = ["EASGD", "SGD", "SSP", "Async", "DiLoCo", "Handle", "KeyValue", "LocalSGD", "Sync"]


def __getattr__(name: str) -> Any:
    if name in ("Handle", "KeyValue"):  # they stand on the launcher, as the store itself does not
        return getattr(importlib.import_module("tensorwire.keyvalue"), name)
    raise AttributeError(f"module 'tensorwire.store' has no attribute {name!r}")
