"""The backend of torch.compile: all workers plan the graphs that dynamo captures, and each runs its own part.

Without a placement, each worker runs the whole graph.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.launch import current_worker
from tensorwire.torch.graph import check_torch
from tensorwire.torch.graph.capture.joint import Boxed, boxed, compiled, own_errors
from tensorwire.torch.graph.compile_options import CompileOptions
from tensorwire.torch.graph.execution.compiled_graph import HERE, HOLDER, Backward, Forward
from tensorwire.torch.graph.placement.remote_tensor import here_now, make_remote
from tensorwire.torch.graph.placement.scope import Scope

_log = logging.getLogger("tensorwire")
_ADVICE = "use options={'outputs': 'all'}, or compute what needs it inside the compiled model"
# The forward graph of each frame, for its backward graph, which is compiled when it is first needed.
_forwards: weakref.WeakKeyDictionary[Any, Forward] = weakref.WeakKeyDictionary()


_captured = threading.Event()  # whether dynamo came with a graph


def _warn_of_nothing() -> None:
    if not _captured.is_set():
        _log.warning(
            "torch.compile(backend='tensorwire') was called, and captured nothing: every worker ran all of the model. "
            "TORCH_LOGS=graph_breaks says why; tensorwire.torch.place(model, workers) makes it an error"
        )


def _watch() -> None:
    """This module is imported when torch.compile first hears of the backend, which it calls when it has a graph."""
    with contextlib.suppress(ArgumentError):  # there is no job yet
        worker = current_worker()
        if worker.rank == 0:
            worker.at_close(_warn_of_nothing)


_watch()


@own_errors
def backend(
    module: fx.GraphModule, examples: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """``torch.compile(model, backend="tensorwire", options={"workers": {...}})``; see `CompileOptions`.

    Call it in every process of the job, with the same model and arguments of the same shapes. Where nothing was placed,
    each process runs all of it, and knows of no other; gradients are born in the slots of a `StoreOptimizer`.

    Raises `ArgumentError` for wrong options and for a process that is in no job, `Unsupported` for a torch before 2.11.
    """
    check_torch()
    _captured.set()
    chosen, worker = CompileOptions.of(options), current_worker()
    scope = Scope.of_frame(chosen.workers)
    parts: list[Forward] = []

    def forward(graph: fx.GraphModule, _: Sequence[Any]) -> Boxed:
        context = torch._guards.TracingContext.get()
        metadata = context.fw_metadata
        assert metadata is not None
        metadata.bw_donated_idxs = []  # buffers that are donated forbid retain_graph=True
        part = _forwards[context] = Forward(graph, worker, chosen, scope, metadata)
        parts.append(part)
        return boxed(part)

    def backward(graph: fx.GraphModule, _: Sequence[Any]) -> Boxed:
        return boxed(Backward(graph, _forwards[torch._guards.TracingContext.get()]))

    with torch._functorch.config.patch(donated_buffer=False):
        run = compiled(module, examples, forward, backward)
    if not parts:  # nothing to compute
        return run

    def call(*args: Any) -> Any:
        return _marked(run(*args), parts[0])

    return call


def _marked(results: Any, part: Forward) -> Any:
    """Marks results that not every worker has, for code that reads them there and for the next graph."""
    if part.analysis is None:  # nothing was placed: all have everything
        return results
    made = next((value for value in results if is_traceable_wrapper_subclass(value)), None)
    if made is not None:
        raise Unsupported(
            f"the model returns a {type(made).__name__}, and a model that is cut over workers returns strided tensors: "
            "return what it consists of, such as values() and offsets() of a nested tensor"
        )
    crossing, workers, me = part.analysis.crossing, part.group.workers, part.group.me
    skip = part.metadata.num_mutated_inp_runtime_indices
    for value, node in zip(results, part.returned[skip:], strict=False):
        if not isinstance(value, torch.Tensor) or not isinstance(node, fx.Node):
            continue
        having = [worker for worker in workers if worker in crossing.holds[node.name]]
        if len(having) == len(workers):
            continue
        here = node.name in crossing.if_small and node.name not in part.stayed
        if here or me in having:
            setattr(value, HOLDER, having[0])
            setattr(value, HERE, here)
            if me not in having:
                here_now(value)
        else:
            make_remote(value, f"output {node.name!r}", having[0], advice=_ADVICE)
    return results
