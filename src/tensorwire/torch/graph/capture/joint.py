"""AOTAutograd's graphs of a captured graph: their inputs and outputs, and functions that run them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import ShortenTraceback

from tensorwire.errors import TensorwireError

_P = ParamSpec("_P")
_R = TypeVar("_R")
Boxed = Callable[[list[Any]], Any]  # it takes the list of all arguments, which it empties
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Boxed]


def compiled(
    module: fx.GraphModule, examples: Sequence[Any], forward: Compiler, backward: Compiler
) -> Callable[..., Any]:
    """``module`` by AOTAutograd: ``forward`` compiles its graph, with gradients or without, ``backward`` theirs.

    Nothing is decomposed, which would change bits; what changes buffers stays a node of the graph. Tokens that keep
    operators with an effect in order are made in the graph: they are neither among its arguments nor its results.
    """

    def inference(graph: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        if any(node.target is torch.ops.prims._make_token.default for node in graph.graph.nodes):
            metadata: Any = torch._guards.TracingContext.get().fw_metadata
            metadata.static_input_indices = _static(module, graph)  # torch 2.13 still counts the tokens here
        return forward(graph, inputs)

    compiler = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, inference_compiler=inference, keep_inference_input_mutations=True
    )
    with torch._functorch.config.patch(unlift_effect_tokens=True):
        result: Callable[..., Any] = compiler(module, examples)
    return result


def _static(module: fx.GraphModule, graph: fx.GraphModule) -> list[int]:
    """The arguments of ``graph`` that stay from call to call: those of ``module``, of which dynamo says so."""
    stays = ["_dynamo_static_input_type" in node.meta.get("tensor_dict", ()) for node in given(module)]
    return [place for place, node in enumerate(given(graph)) if stays[node.meta["desc"].idx]]


def own_errors(backend: Callable[_P, _R]) -> Callable[_P, _R]:
    """``backend``, whose `TensorwireError` dynamo lets through: of any other error it makes a BackendCompilerFailed."""

    @functools.wraps(backend)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        try:
            return backend(*args, **options)
        except TensorwireError as error:
            if not isinstance(error, ShortenTraceback):  # the kind of error that dynamo raises again as it is
                kind: Any = type(error)
                error.__class__ = type(kind.__name__, (kind, ShortenTraceback), {"__module__": kind.__module__})
            error.first_useful_frame = inspect.currentframe()  # type: ignore[attr-defined]  # dynamo's are not
            raise

    return call


def boxed(call: Boxed) -> Boxed:
    """A function, whose attributes torch's wrappers copy; so they know that it takes a list, and empties it."""

    def run(args: list[Any]) -> Any:
        return call(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def function_of(graph: fx.Graph, module: fx.GraphModule) -> Boxed:
    """``graph`` as a function; what it is made of belongs to ``module``."""
    graph.set_codegen(fx.graph._BoxedCodeGen())  # arguments are freed as soon as they were used
    return fx.GraphModule(module, graph).forward


def given(module: fx.GraphModule) -> list[fx.Node]:
    """Its arguments."""
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def returned(module: fx.GraphModule) -> list[Any]:
    """Its outputs."""
    return list(next(iter(reversed(module.graph.nodes))).args[0])
