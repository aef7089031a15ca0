"""Traces a model's computation without a job and without weights, on tensors that have no memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import _pytree as pytree

from tensorwire.errors import ArgumentError, TensorwireError
from tensorwire.torch.graph.capture.joint import Boxed, boxed, compiled, given
from tensorwire.torch.graph.capture.module_paths import module_path


@dataclass(frozen=True)
class Traced:
    """A graph as AOTAutograd makes it, and that of its gradients. ``static``: which of its arguments stay from call to
    call; ``returns``: how many of its outputs are the caller's."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    static: frozenset[int]
    returns: int


@dataclass(frozen=True)
class ModelTrace:
    """A ``model`` that was traced in so many ``seconds``. ``parameters``: bytes and elements by name, of each once."""

    model: nn.Module
    parameters: Mapping[str, tuple[int, int]]
    traced: tuple[Traced, ...]
    seconds: float

    def layers(self) -> dict[str, int]:
        """Bytes of the parameters that each module uses first, by its path, in the order in which modules run."""
        found: dict[str, int] = {}
        for traced in self.traced:
            for node in traced.forward.graph.nodes:
                if (path := module_path(node)) is not None:
                    found.setdefault(path, 0)
            for index, node in enumerate(given(traced.forward)):
                if index in traced.static and node.users:
                    found[module_path(next(iter(node.users))) or ""] += node.meta["val"].nbytes
        return found


def trace_model(
    model: Callable[[], nn.Module], inputs: Callable[[], Sequence[Any]], *, inference: bool = False
) -> ModelTrace:
    """Traces what ``model()`` does with ``inputs()``, and its gradients unless ``inference``. Neither gets memory.

    A model that reads tensors while it is made is made with its weights, which are dropped then.

    Raises `ArgumentError` if it cannot be traced.
    """
    start = time.perf_counter()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module = _made(model, mode)
    examples = pytree.tree_map_only(torch.Tensor, mode.from_tensor, tuple(inputs()))
    tracer = _Tracer()
    torch.compiler.reset()
    try:
        with mode, torch.set_grad_enabled(not inference):
            results = torch.compile(module, backend=tracer.backend)(*examples)
            if not inference:
                _differentiate(results)
    except TensorwireError:
        raise
    except Exception as error:  # whatever a model raises
        raise ArgumentError(f"{type(module).__name__} cannot be traced: {_why(error)}") from error
    finally:
        torch.compiler.reset()
    if not tracer.forwards:
        raise ArgumentError(f"{type(module).__name__} has no operators to trace")
    parameters = {name: (p.nbytes, p.numel()) for name, p in module.named_parameters()}
    return ModelTrace(module, parameters, tracer.traced(), time.perf_counter() - start)


def _made(model: Callable[[], nn.Module], mode: FakeTensorMode) -> nn.Module:
    """The model, whose parameters and buffers have no memory."""
    try:
        with mode:
            return model()
    except Exception as error:
        if not isinstance(error.__cause__ or error, DataDependentOutputException):
            raise
    module = model()  # its constructor calls item(), such as of rates of stochastic depth
    for one in module.modules():
        for own in (one._parameters, one._buffers):
            found: Any = own
            found.update({name: mode.from_tensor(value) for name, value in own.items() if value is not None})
    return module


def _why(error: Exception) -> str:
    """In one line. Dynamo says in the middle of many what the operator said."""
    text = str(error).strip()
    said = re.search(r"got \w+\([\"'](.+)[\"']\)", text)
    return said[1] if said else text.partition("\n")[0]


def _differentiate(results: Any) -> None:
    wanted = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not wanted:
        raise ArgumentError("nothing that the model returns has a gradient: use --inference")
    torch.autograd.backward(wanted, [torch.ones_like(leaf) for leaf in wanted])


class _Tracer:
    """A backend of torch.compile that keeps the graphs. They run only so far that the next one is traced."""

    def __init__(self) -> None:
        self.forwards: dict[Any, tuple[fx.GraphModule, Any]] = {}
        self.backwards: dict[Any, fx.GraphModule] = {}

    def backend(self, module: fx.GraphModule, examples: Sequence[Any]) -> Any:
        return compiled(module, examples, self._forward, self._backward)

    def _forward(self, module: fx.GraphModule, _: Sequence[Any]) -> Boxed:
        context = torch._guards.TracingContext.get()
        self.forwards[context] = (module, context.fw_metadata)
        return _interpreted(module)

    def _backward(self, module: fx.GraphModule, _: Sequence[Any]) -> Boxed:
        self.backwards[torch._guards.TracingContext.get()] = module
        return _interpreted(module)

    def traced(self) -> tuple[Traced, ...]:
        found = []
        for context, (module, metadata) in self.forwards.items():
            static = frozenset(metadata.static_input_indices)
            found.append(Traced(module, self.backwards.get(context), static, metadata.num_forward_returns))
        return tuple(found)


def _interpreted(module: fx.GraphModule) -> Boxed:
    return boxed(lambda args: fx.Interpreter(module).boxed_run(args))
