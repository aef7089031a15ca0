"""Parameters that get their first gradient later than their neighbours in the bucket, or only now and then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire.store.rules import ELEMENTWISE, WHOLE, with_implementation
from tests.harness.jobs import for_each, run_job

# All but "large" share one bucket.
SHAPES = {"first": (5, 3), "second": (7, 2), "third": (2, 9), "fourth": (3, 3), "large": (96, 128)}
STEPS = 6
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}, "RMSprop": {"lr": 0.01, "momentum": 0.5}}
IMPLEMENTATIONS: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": False, "foreach": False}]
Case = tuple[str, dict[str, Any], str]  # an optimizer, its options, and how gradients come


def cases(pattern: str) -> list[Case]:
    found: list[Case] = []
    for name in (*ELEMENTWISE, *WHOLE):
        known = torch.optim.__dict__[name].__init__.__annotations__
        for implementation in IMPLEMENTATIONS:
            if all(k in known for k in implementation):
                found.append((name, {**OPTIONS.get(name, {"lr": 0.01}), **implementation}, pattern))
    for options in ({"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.3}, {"momentum": 0.0}):
        found.append(("SGD", {"lr": 0.1, **options}, pattern))
    return found


def takes_part(name: str, step: int, pattern: str) -> bool:
    """Whether a parameter has a gradient in a step."""
    if name == "first":
        return True
    if pattern == "late":
        return step >= {"second": 1, "third": 3, "fourth": 9, "large": 2}[name]
    return (step + len(name)) % 2 == 0  # alternating


def gradient(name: str, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def groups(params: dict[str, torch.nn.Parameter], lr: float) -> list[dict[str, Any]]:
    named = list(params.items())
    return [{"params": named[:2]}, {"params": named[2:], "lr": lr / 2}]


def options_of(group: dict[str, Any], step: int) -> None:
    if step == 2 and group.get("momentum") == 0.0:
        group["momentum"] = 0.9


def train_store(job: tw.Job, case: Case, overlap: bool) -> dict[str, torch.Tensor]:
    name, options, pattern = case
    params = parameters()
    optimizer = tw.torch.StoreOptimizer(
        groups(params, options["lr"]), getattr(torch.optim, name), overlap=overlap, bucket_bytes=32 << 10, **options
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            options_of(group, step)
        loss = torch.zeros(())
        for key, p in params.items():
            if takes_part(key, step, pattern):
                loss = loss + (p * gradient(key, job.rank, step)).sum()
        loss.backward()
        optimizer.step()
    optimizer.wait()
    return {key: p.detach().clone() for key, p in params.items()}


def reference(case: Case, workers: int) -> dict[str, torch.Tensor]:
    """One process. Torch's fused SGD cannot step parameters with and without momentum together: one for each."""
    name, options, pattern = case
    params, cls = parameters(), getattr(torch.optim, name)
    chosen = with_implementation(cls, options)
    each = name == "SGD" and chosen.get("fused")
    grouped = groups(params, options["lr"])
    built = (
        [cls([{**g, "params": [p]}], **chosen) for g in grouped for p in g["params"]]
        if each
        else [cls(grouped, **chosen)]
    )
    for step in range(STEPS):
        for key, p in params.items():
            p.grad = None
            if takes_part(key, step, pattern):
                p.grad = sum(gradient(key, rank, step) for rank in range(workers)) / workers
        for optimizer in built:
            for group in optimizer.param_groups:
                options_of(group, step)
            optimizer.step()
    return {key: p.detach() for key, p in params.items()}


def check(chosen: list[Case], *, device: str, overlap: bool, servers: int) -> None:
    results = run_job(for_each, train_store, [(case, overlap) for case in chosen], device=device, servers=servers).ok()
    for at, case in enumerate(chosen):
        stock = reference(case, 2)
        for mine in results:
            for key, value in mine[at].items():
                assert torch.equal(value, stock[key]), (case, key)


@pytest.mark.long
@pytest.mark.parametrize("pattern", ["alternating", "late"])
def test_every_optimizer_takes_first_gradients_at_any_step(pattern: str) -> None:
    check(cases(pattern), device="shm", overlap=False, servers=1)


@pytest.mark.parametrize(
    ("device", "overlap"), [("shm", True), ("tcp", False), pytest.param("tcp", True, marks=pytest.mark.long)]
)
def test_late_first_gradients_over_devices_and_with_overlap(device: str, overlap: bool) -> None:
    chosen = [case for case in cases("late") if case[0] in ("SGD", "AdamW")]
    check(chosen, device=device, overlap=overlap, servers=2)


def unfreeze(job: tw.Job) -> list[dict[str, torch.Tensor]]:
    found = []
    for kind in ("store", "stock"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model[1].requires_grad_(False)
        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
        if kind == "store":
            optimizer: torch.optim.Optimizer = tw.torch.StoreOptimizer(
                model.named_parameters(), torch.optim.SGD, fused=False, **options
            )
        else:
            optimizer = torch.optim.SGD(model.parameters(), **options)
        for step in range(4):
            model[1].requires_grad_(step >= 2)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        found.append({k: v.clone() for k, v in model.state_dict().items()})
    return found


def test_layers_may_be_unfrozen_while_training() -> None:
    for store, stock in run_job(unfreeze, workers=1).ok():
        assert all(torch.equal(store[key], stock[key]) for key in stock)


def resume(job: tw.Job) -> bool:
    """A state in which only some parameters have momentum is saved and loaded."""

    def steps(params: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, first: int, stop: int) -> None:
        for step in range(first, stop):
            for key, p in params.items():
                p.grad = gradient(key, 0, step) if takes_part(key, step, "late") else None
            optimizer.step()

    def made(params: dict[str, torch.nn.Parameter]) -> tw.torch.StoreOptimizer:
        return tw.torch.StoreOptimizer(params.items(), torch.optim.SGD, lr=0.1, momentum=0.9)

    straight, halted = parameters(), parameters()
    steps(straight, made(straight), 0, STEPS)
    optimizer = made(halted)
    steps(halted, optimizer, 0, 2)
    again = {key: torch.nn.Parameter(p.detach().clone()) for key, p in halted.items()}
    other = made(again)
    other.load_state_dict(optimizer.state_dict())
    steps(again, other, 2, STEPS)
    return all(torch.equal(again[key], straight[key]) for key in straight)


def test_a_state_without_some_momenta_is_resumed() -> None:
    assert run_job(resume, workers=1).ok() == [True]
