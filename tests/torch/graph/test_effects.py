"""Operators with an effect, which AOTAutograd keeps in order by tokens: cut graphs have the bits of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tensorwire as tw
from tensorwire.torch.graph.capture.joint import given
from tensorwire.torch.graph.planning.trace_model import trace_model
from tests.harness.jobs import for_each, run_job
from tests.levels import long
from tests.torch.graph.cuts import same_bits

Function = Callable[[torch.Tensor], torch.Tensor]


def ordered(name: str, outputs: int) -> Any:
    """A custom operator with an effect, in forward and in backward: so many times its operand, each once more."""

    def multiples(x: torch.Tensor) -> list[torch.Tensor]:
        return [x * (i + 1) for i in range(outputs)]

    backward = torch.library.custom_op(f"{name}_backward", lambda g: g.clone(), mutates_args=(), schema=_schema(1))
    backward.register_fake(torch.empty_like)
    op = torch.library.custom_op(
        name,
        lambda x: multiples(x)[0] if outputs == 1 else tuple(multiples(x)),
        mutates_args=(),
        schema=_schema(outputs),
    )
    op.register_fake(lambda x: multiples(x)[0] if outputs == 1 else tuple(multiples(x)))
    op.register_autograd(lambda ctx, *grads: backward(sum(g * (i + 1) for i, g in enumerate(grads))))
    for one in (op, backward):
        one.register_effect(torch.library.EffectType.ORDERED)
    return op


def _schema(outputs: int) -> str:
    return "(Tensor x) -> " + ("Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})")


ONE, TWO = ordered("tensorwire_tests::one", 1), ordered("tensorwire_tests::two", 2)


def _printed(x: torch.Tensor) -> torch.Tensor:
    torch.ops.aten._print("an effect")
    return x + 1


def _printed_by_python(x: torch.Tensor) -> torch.Tensor:
    torch._higher_order_ops.print("an effect")
    return x + 1


LINALG: dict[str, Function] = {
    "inv": torch.linalg.inv,
    "inv_ex": lambda x: torch.linalg.inv_ex(x, check_errors=True)[0],
    "solve": lambda x: torch.linalg.solve(x, x + 1),
    "cholesky": torch.linalg.cholesky,
    "lu_factor": lambda x: torch.linalg.lu_factor(x)[0],
    "tensorinv": lambda x: torch.linalg.tensorinv(x[0].view(2, 2, 4)).reshape(1, 4, 4) + x,
}
CASES: dict[str, dict[str, Function]] = {
    "aten::_linalg_check_errors": LINALG,
    "aten::_print": {"print": _printed},
    "higher_order::print": {"printed by Python": _printed_by_python},
    "tensorwire_tests::one": {"one": lambda x: ONE(x)},
    "tensorwire_tests::two": {"two": lambda x: torch.mul(*TWO(x))},
}
# They need a class in C++, and a function of Python that is no operator.
NOT_HERE = {"higher_order::call_torchbind", "higher_order::invoke_leaf_function"}


def test_all_operators_that_have_a_token_are_here() -> None:
    """A torch that registers another one fails here: write a case for it."""
    registered = torch._library.simple_registry.singleton._data
    effects = {name for name, entry in registered.items() if entry.effect.effect is not None}
    assert "aten::_print" in effects
    assert {name for name in effects if not name.startswith("tensorwire_tests")} <= CASES.keys() | NOT_HERE


class Effect(nn.Module):
    """The effect as a module, to be placed."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Net(nn.Module):
    """An effect between two linear layers, and another one after them. It returns a prediction and a metric."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(4, 4)
        self.effect, self.again = Effect(function), Effect(torch.linalg.inv)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a = self.first(x).view(-1, 4, 4)
        square = self.effect(a @ a.mT + torch.eye(4))
        y = self.last(square.sum(-1))
        return y, self.again(y[:, None] * y[..., None] + torch.eye(4)).sum(), (y.detach() > 0).float().mean(0)


def differing(job: tw.Job, name: str) -> list[str]:
    """What is not as in one process: results, gradients, and results without gradients."""
    function, placed = ALL[name]
    torch.compiler.reset()
    torch.manual_seed(0)
    net = Net(function)
    alone = copy.deepcopy(net)
    workers = {"": 0, "effect": 1, "again": 0, "last": 1}
    options = {} if placed else {"workers": workers}
    if placed:
        tw.torch.place(net, workers)
    mine, reference = (
        torch.compile(net, backend="tensorwire", options=options),
        torch.compile(alone, backend="aot_eager"),
    )
    wrong = []
    for step in range(3):
        x = torch.randn(3, 6)
        with torch.set_grad_enabled(step < 2):
            results, right = mine(x), reference(x)
        pairs = zip(results, right, strict=True)
        wrong += [f"{name}, step {step}: result {i}" for i, (a, b) in enumerate(pairs) if not same_bits(a, b)]
        if step < 2:
            (results[0].square().mean() + results[1]).backward()
            (right[0].square().mean() + right[1]).backward()
            for (path, p), its in zip(net.named_parameters(), alone.parameters(), strict=True):
                if (p.grad is not None) != (job.rank == path.startswith("last")):
                    wrong.append(f"{name}, step {step}: {path} has a gradient on the wrong worker")
                elif p.grad is not None and not same_bits(p.grad, its.grad):
                    wrong.append(f"{name}, step {step}: gradient of {path}")
    return wrong


ALL = {
    name: (function, number % 2 == 0)  # every other one is placed, and not by options
    for number, (name, function) in enumerate((k, f) for several in CASES.values() for k, f in several.items())
}


FEW = ["inv", "print", "two"]


@pytest.mark.parametrize(
    "names", [pytest.param(FEW, marks=pytest.mark.slow), long([name for name in ALL if name not in FEW])], ids=str
)
def test_cut_graphs_with_effects(names: list[str]) -> None:
    cases = [(name,) for name in names]
    assert run_job(for_each, differing, cases, workers=2, servers=0, device="shm").ok() == [[[]] * len(cases)] * 2


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("inference", [False, True])
def test_tokens_are_no_arguments(inference: bool) -> None:
    """What stays from call to call are the parameters, as without effects."""

    def static(function: Function) -> list[Any]:
        def net() -> Net:
            made = Net(function)
            made.again = Effect(torch.relu)
            return made

        traced = trace_model(net, lambda: [torch.randn(3, 6)], inference=inference).traced[0]
        nodes = enumerate(given(traced.forward))
        return [(index, tuple(node.meta["val"].shape)) for index, node in nodes if index in traced.static]

    right = static(torch.relu)
    assert sorted(shape for _, shape in right) == sorted(tuple(p.shape) for p in Net(torch.relu).parameters())
    assert static(lambda x: ONE(x)) == right
