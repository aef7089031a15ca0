"""Random programs over the operators of `operators`, whose operands lie in memory in every way, and cuts of them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module

from tests.torch.graph.operators import CASES, Case
from tests.torch.graph.rooms import listed

aten = torch.ops.aten
LAYOUTS = ("plain", "permuted", "expanded", "sliced", "channels-last")
RANDOM = ("dropout", "bernoulli")  # workers that are threads of one process share one generator
EMPTY = [
    Case("empty-mm", aten.mm.default, lambda v: (v(0, 16), v(16, 40))),
    Case("empty-mm-between", aten.mm.default, lambda v: (v(24, 0), v(0, 40))),
    Case("empty-add", aten.add.Tensor, lambda v: (v(8, 0), v(8, 1))),
    Case("empty-relu", aten.relu.default, lambda v: (v(0, 3, 4, 4),)),
    Case("empty-cat", aten.cat.default, lambda v: ([v(0, 16), v(9, 16)],)),
    Case("empty-sum", aten.sum.dim_IntList, lambda v: (v(0, 24), [0])),
    Case("empty-layer_norm", aten.native_layer_norm.default, lambda v: (v(0, 32), [32], v(32), v(32), 1e-5)),
    Case("empty-sort", aten.sort.default, lambda v: (v(0, 4),)),
    Case("empty-clone", aten.clone.default, lambda v: (v(4, 0, 5),)),
]
USABLE = [case for case in CASES if case.name not in RANDOM] + EMPTY
Values = tuple[torch.Tensor, ...]


def laid(value: torch.Tensor, shape: Sequence[int], layout: str, draw: random.Random, rows: int = 0) -> torch.Tensor:
    """A tensor of that shape and layout, of the elements of ``value``. The ``rows`` last dimensions lie as usual."""
    rank, count = len(shape), math.prod(shape)
    turned = rank - rows
    if layout == "channels-last" and turned == 4:
        return laid(value, shape, "plain", draw).contiguous(memory_format=torch.channels_last)
    if layout == "expanded" and turned > 0:
        dim = draw.randrange(turned)
        one = [1 if i == dim else length for i, length in enumerate(shape)]
        return laid(value, one, "plain", draw).expand(shape)
    if layout == "sliced" and turned > 0:
        wide = [2 * length if i == turned - 1 else length for i, length in enumerate(shape)]
        return aten.slice(laid(value, wide, "plain", draw), turned - 1, draw.randrange(2), None, 2)
    flat = value.reshape(-1)
    if flat.numel() < count:
        flat = flat.repeat(-(-count // max(1, flat.numel()))) if flat.numel() else flat.new_ones(count)
    flat = flat[:count]
    if layout == "permuted" and turned > 1:
        order = [*draw.sample(range(turned), turned), *range(turned, rank)]
        return flat.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(rank)])
    return flat.view(list(shape))


def apply(case: Case, values: Sequence[torch.Tensor], layout: str, seed: int) -> list[torch.Tensor]:
    """The operator's tensors, of operands made of ``values``."""
    draw = random.Random(seed)

    def operand(*shape: int) -> torch.Tensor:
        value = values[draw.randrange(len(values))]
        # Without a gradient, by operators: tracing with torch 2.15 drops detach().
        value = value if case.name in differentiable() else (value > 0).to(value.dtype)
        rows = int(case.name.startswith("flash"))  # this kernel takes the last dimension for contiguous
        made = laid(value, shape, layout, draw, rows)
        # Some operators for batch norm change their running averages, and their schemas do not say so.
        return made.clone() if "batch_norm" in case.name and len(shape) == 1 else made

    return [one for one in listed(case.op(*case.make(operand))) if isinstance(one, torch.Tensor)]


@functools.cache
def differentiable() -> frozenset[str]:
    """The names of the operators that have a gradient."""
    return frozenset(case.name for case in USABLE if _has_gradient(case))


def _has_gradient(case: Case) -> bool:
    given: list[torch.Tensor] = []

    def operand(*shape: int) -> torch.Tensor:
        given.append(torch.rand(shape).requires_grad_())
        return given[-1].clone()

    try:
        results = listed(case.op(*case.make(operand)))
        wanted = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        if wanted:
            torch.autograd.grad([r.sum() for r in wanted], given, allow_unused=True)
    except (RuntimeError, NotImplementedError):
        return False
    return bool(wanted)


def program(seed: int, steps: int) -> tuple[Callable[..., Values], list[torch.Tensor]]:
    """A function that returns a loss and values, and its arguments; drawn by ``seed``."""
    draw = random.Random(seed)
    chosen = [(draw.choice(USABLE), draw.choice(LAYOUTS), draw.randrange(2**32)) for _ in range(steps)]
    generator = torch.Generator().manual_seed(seed)
    examples = [torch.randn(4, 6, 8, generator=generator), torch.randn(2, 3, 12, 12, generator=generator)]

    def function(*inputs: torch.Tensor) -> Values:
        values = list(inputs)
        for case, layout, salt in chosen:
            made = apply(case, values[-4:], layout, salt)
            values += [one for one in made if one.dtype == torch.float32]
        last = values[-4:]
        loss = sum((value.tanh().mean() for value in last if value.numel()), inputs[0].mean() + inputs[1].mean())
        return loss, *last  # type: ignore[return-value]

    return function, examples


def with_gradients(function: Callable[..., Values]) -> Callable[..., Values]:
    """``function``, which returns the gradients of its arguments besides: by operators of the same graph."""

    def both(*inputs: torch.Tensor) -> Values:
        given = [value.detach().requires_grad_() for value in inputs]
        results = function(*given)
        grads = torch.autograd.grad(results[0], given)
        return *(result.detach() for result in results), *grads

    return both


def traced(function: Callable[..., Values], examples: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The operators of ``function``."""
    function(*examples)  # what is made once is no part of the graph
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have one shape, one dtype and the same bits; a NaN is as good as another one."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one, other) or torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5)))


class Net(torch.nn.Module):
    """A program as modules to be placed: `body.submod_0` and so on, each some operators of it one after another."""

    def __init__(self, seed: int, steps: int) -> None:
        super().__init__()
        function, examples = program(seed, steps)
        module = traced(function, examples)
        order = {node: place for place, node in enumerate(module.graph.nodes)}
        size = 1 + len(order) // (2 * steps)
        self.body = split_module(module, module, lambda node: order[node] // size, keep_original_order=True)
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(one.shape, generator=generator) for one in examples]
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, *inputs: torch.Tensor) -> Values:
        results: Values = self.body(*(one * weight for one, weight in zip(inputs, self.weights, strict=True)))
        return results

    def workers(self, seed: int, count: int) -> dict[str, int]:
        """A worker for each module."""
        draw = random.Random(seed)
        paths = (f"body.{name}" for name, _ in self.body.named_children())
        return {"": 0, **{path: draw.randrange(count) for path in paths}}
