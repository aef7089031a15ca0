"""An optimizer that a script has built already is taken over: class, groups, options and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tensorwire as tw
from tensorwire import errors
from tests.harness.jobs import for_each, in_turn, run_job
from tests.torch.refusals import not_refused


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


def steps(net: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> dict[str, torch.Tensor]:
    for step in range(count):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()
    return {k: v.clone() for k, v in net.state_dict().items()}


def grouped(net: torch.nn.Sequential, *, names: bool = False, **options: Any) -> torch.optim.AdamW:
    def params(module: torch.nn.Module, prefix: str) -> Any:
        return list(module.named_parameters(prefix)) if names else list(module.parameters())

    groups = [
        {"params": params(net[2], "2"), "weight_decay": 0.3},
        {"params": params(net[0], "0"), "lr": 0.05},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), **options)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def taken_over(job: tw.Job) -> list[bool]:
    """Class, groups and options are those of the instance."""
    stock = model()
    expected = steps(stock, grouped(stock, fused=True), 3)
    beside, alone, single = model(), model(), model()
    first = tw.torch.StoreOptimizer(beside.named_parameters(), grouped(beside))
    second = tw.torch.StoreOptimizer(grouped(alone, names=True), overlap=True)
    third = tw.torch.StoreOptimizer(
        single.named_parameters(), torch.optim.SGD(single.parameters(), lr=0.1, foreach=True)
    )
    other = model()
    sgd = torch.optim.SGD(other.parameters(), lr=0.1, foreach=True)
    return [
        same(steps(beside, first, 3), expected),
        same(steps(alone, second, 3), expected),
        same(steps(single, third, 3), steps(other, sgd, 3)),
        [g["weight_decay"] for g in first.param_groups] == [0.3, 0.01],
        [g["lr"] for g in first.param_groups] == [0.01, 0.05],
        first.param_groups[0]["param_names"] == ["2.weight", "2.bias"],
        third.param_groups[0]["foreach"] is True and not third.param_groups[0]["fused"],
    ]


def with_state(job: tw.Job, kind: str) -> bool:
    cls = getattr(torch.optim, kind)
    options = {"lr": 0.05, "momentum": 0.9} if kind == "SGD" else {"lr": 0.05}
    whole, net = model(), model()
    stock = cls(whole.parameters(), fused=True, **options)
    instance = cls(net.parameters(), fused=True, **options)
    steps(whole, stock, 2)
    steps(net, instance, 2)
    optimizer = tw.torch.StoreOptimizer(net.named_parameters(), instance)
    return same(steps(net, optimizer, 3), steps(whole, stock, 3))


def test_its_state_is_taken_over_exactly() -> None:
    assert run_job(for_each, with_state, [("AdamW",), ("SGD",), ("Adagrad",)]).ok() == [[True] * 3] * 2


def scheduled() -> None:
    net = model()
    adam = torch.optim.Adam(net.parameters())
    torch.optim.lr_scheduler.StepLR(adam, 1)
    tw.torch.StoreOptimizer(net.named_parameters(), adam)


def hooked() -> None:
    net = model()
    adam = torch.optim.Adam(net.parameters())
    adam.register_step_pre_hook(lambda *_: None)
    tw.torch.StoreOptimizer(net.named_parameters(), adam)


def with_groups_twice() -> None:
    net = model()
    groups = [{"params": list(net.named_parameters()), "lr": 0.1}]
    tw.torch.StoreOptimizer(groups, torch.optim.Adam(net.parameters()))


def broken_state() -> None:
    net = model()
    adam = torch.optim.Adam(net.parameters())
    adam.state[net[0].weight] = {"step": torch.tensor(1.0)}
    tw.torch.StoreOptimizer(net.named_parameters(), adam)


REFUSED: dict[str, Callable[[], object]] = {
    "build it from model.named_parameters()": lambda: tw.torch.StoreOptimizer(torch.optim.Adam(model().parameters())),
    "not among those with names": lambda: tw.torch.StoreOptimizer(
        model().named_parameters(), torch.optim.Adam(model().parameters())
    ),
    "'lr' belongs to the Adam": lambda: tw.torch.StoreOptimizer(torch.optim.Adam(model().named_parameters()), lr=0.1),
    "pass an optimizer alone": lambda: tw.torch.StoreOptimizer(
        torch.optim.Adam(model().named_parameters()), torch.optim.SGD
    ),
    "construct it on the StoreOptimizer": scheduled,
    "register them on the StoreOptimizer": hooked,
    "has the groups": with_groups_twice,
    "has no 'exp_avg'": broken_state,
    "a class such as torch.optim.AdamW, not None": lambda: tw.torch.StoreOptimizer(model().named_parameters()),
}


def refused(job: tw.Job) -> list[str]:
    found = not_refused((errors.ArgumentError, says, call) for says, call in REFUSED.items())
    net = model()
    steps(net, tw.torch.StoreOptimizer(torch.optim.Adam(net.named_parameters())), 1)
    return found


def test_an_instance_is_taken_over_or_refused_with_the_reason() -> None:
    assert run_job(in_turn, taken_over, refused).ok() == [[[True] * 7, []]] * 2
