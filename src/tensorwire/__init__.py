"""Tensorwire: train across processes and machines by one-sided writes.

::

    import tensorwire as tw

    job = tw.init()
    optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.AdamW, lr=3e-4)
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError("tensorwire runs on Linux only: it is built on memfd, futex and epoll")

from tensorwire import errors
from tensorwire.launch import Job, init

if TYPE_CHECKING:
    from tensorwire import files as files
    from tensorwire import store as store
    from tensorwire import torch as torch
    from tensorwire.torch.graph.placement.scope import worker

__version__ = "0.1.0"
__all__ = ["Job", "__version__", "errors", "init", "worker"]  # without torch: a star import would hide PyTorch


def __getattr__(name: str) -> Any:
    if name in ("files", "store", "torch"):  # loaded when first used: importing torch takes seconds
        return importlib.import_module(f"tensorwire.{name}")
    if name == "worker":
        value = importlib.import_module("tensorwire.torch.graph.placement.scope").worker
        globals()[name] = value  # dynamo reads it as any global
        return value
    raise AttributeError(f"module 'tensorwire' has no attribute {name!r}")
