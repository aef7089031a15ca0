"""Whether a placed module runs in a compiled graph. Hooks notice modules outside, because dynamo skips frames silently.

While dynamo traces, the hooks do nothing, and leave nothing in the graph. So they run only where it did not trace:
around the frames that it compiles, and around frames that it skips, such as `torch.nn.LSTM`. There no graph runs in
between.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from tensorwire.errors import Unsupported
from tensorwire.torch.graph.placement.placed_models import placement_of

_OURS = __name__.rsplit(".", 2)[0]
_handles: weakref.WeakKeyDictionary[torch.nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()


class _Runs(threading.local):
    """Of this thread: how many graphs ran, and had run when a module began."""

    def __init__(self) -> None:
        self.graphs = 0
        self.begun: dict[int, int] = {}


_runs = _Runs()


def graph_runs() -> None:
    """A forward or inference graph begins to run in this thread."""
    _runs.graphs += 1


def watch(model: torch.nn.Module) -> None:
    """Lets placed modules of ``model`` raise `Unsupported` when they ran outside compiled graphs."""
    _leave_alone()
    for module in model.modules():
        placement = placement_of(module)
        if placement is not None and (placement.worker is not None or isinstance(module, _BatchNorm)):
            before, after = module.register_forward_pre_hook(_before), module.register_forward_hook(_after)
            _handles[module] = [before, after]


def unwatch(model: torch.nn.Module) -> None:
    """Undoes `watch`."""
    for module in model.modules():
        for handle in _handles.pop(module, ()):
            handle.remove()


def _before(module: torch.nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        _runs.begun[id(module)] = _runs.graphs
        if isinstance(module, _BatchNorm) and module.momentum is None:
            torch.compiler.disable(check_momentum)(module)  # type: ignore[no-untyped-call]


def check_momentum(module: torch.nn.Module) -> None:
    """Raises `Unsupported` for a batch norm with ``momentum=None`` in training.

    It reads its count of batches in Python in every step, and only the worker that owns the count has its value.
    """
    placement = placement_of(module)
    if placement is None or not isinstance(module, _BatchNorm) or module.momentum is not None:
        return
    if module.training and module.track_running_stats:
        raise Unsupported(
            f"{placement.path or 'the model'} ({type(module).__name__}) has momentum=None, so each training step reads "
            "its num_batches_tracked in Python, which only one worker has: give it a momentum, such as 0.1"
        )


def _after(module: torch.nn.Module, args: Any, result: Any) -> None:
    if torch.compiler.is_compiling() or _runs.begun.pop(id(module), -1) != _runs.graphs:
        return
    placement = placement_of(module)
    if placement is not None and placement.worker is None:
        return
    given = {id(a) for a in tree_leaves(args)}
    if any(isinstance(r, torch.Tensor) and id(r) not in given for r in tree_leaves(result)):
        # What hands on its inputs, as torch.nn.Identity does, computed nothing.
        torch.compiler.disable(_refuse)(module)  # type: ignore[no-untyped-call]  # no frame for dynamo to compile


def left_out() -> Unsupported | None:
    """The error of a recurrent module of torch that runs now and is placed: dynamo leaves all of them out."""
    module = running_module()
    return _outside(module) if isinstance(module, torch.nn.RNNBase) else None


def _refuse(module: torch.nn.Module) -> None:
    if (error := _outside(module)) is not None:
        raise error


def _outside(module: torch.nn.Module) -> Unsupported | None:
    placement = placement_of(module)
    if placement is None:  # a copy: it took the hooks along, but is not placed
        return None
    what = f"{placement.path or 'the model'} ({type(module).__name__}, placed on {placement.worker})"
    return Unsupported(
        f"{called_at()}: {what} ran outside a compiled graph, so it would run on every worker. Compile the model with "
        "torch.compile(model, backend='tensorwire'); if it is, dynamo left this out: TORCH_LOGS=graph_breaks says why, "
        "and torch.nn.LSTM and GRU must be written as cells. To run it uncompiled, in one process, call "
        "tensorwire.torch.unplace(model) first"
    )


def called_at() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor of this package."""
    for frame in _frames():
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "contextlib", _OURS)):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "somewhere"


def running_module() -> torch.nn.Module | None:
    """The module whose ``forward`` the interpreter is in: compiled frames begin there, and inner calls are inlined."""
    return next((m for m in _modules(torch.nn.Module._call_impl)), None)


def compiled_model() -> torch.nn.Module | None:
    """The model that `torch.compile`, or its own ``compile()``, was called with, while it runs."""
    for module in _modules(torch.nn.Module._wrapped_call_impl):
        inner = getattr(module, "_orig_mod", None)
        if isinstance(inner, torch.nn.Module):
            return inner
        if module._compiled_call_impl is not None:
            return module
    return None


def _modules(method: Any) -> Iterator[torch.nn.Module]:
    """The modules of the frames of a method of `torch.nn.Module`, innermost first."""
    for frame in _frames():
        if frame.f_code is method.__code__:
            yield frame.f_locals["self"]


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _leave_alone() -> None:
    """Dynamo must not compile the hooks as frames of their own, where it would take itself to be tracing.

    It still inlines them. The function is private: without it the hooks notice models that were never compiled, but
    no frame that dynamo left out.
    """
    from torch._dynamo import eval_frame

    skip = getattr(eval_frame, "skip_code", None)
    if skip is not None:
        skip(_before.__code__)
        skip(_after.__code__)
