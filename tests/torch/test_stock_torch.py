"""Stock training loops of torch with a StoreOptimizer: schedulers, GradScaler, hooks of a step, torch.compile.

Every worker trains twice, in the job and then alone with torch's own optimizer on the gradients of all workers, summed
in worker order and divided by their number. The two must have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import tensorwire as tw
from tensorwire.store.rules import with_implementation
from tests.harness.jobs import for_each, in_turn, run_job

STEPS = 9
WORKERS = (0, 1)
State = dict[str, torch.Tensor]


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))


def loss_of(net: torch.nn.Module, worker: int, step: int) -> torch.Tensor:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * worker + step))
    loss: torch.Tensor = net(x).square().mean()
    return loss


def set_gradients(net: torch.nn.Module, workers: tuple[int, ...], step: int) -> None:
    """The mean of what each of ``workers`` would have; with one of them, its own."""
    parameters = list(net.parameters())
    found = [torch.autograd.grad(loss_of(net, w, step), parameters) for w in workers]
    for p, first, *rest in zip(parameters, *found, strict=True):
        p.grad = first
        for g in rest:
            p.grad = p.grad + g
        p.grad = p.grad / len(workers)


def stock(net: torch.nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    """torch's own, in the implementation that servers choose."""
    return kind(net.parameters(), **with_implementation(kind, options))


def state(net: torch.nn.Module) -> State:
    return {k: v.clone() for k, v in net.state_dict().items()}


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---- schedulers

Options = list[dict[str, Any]]  # of the first parameter group, a step
SCHEDULES: dict[str, tuple[str, Callable[[torch.optim.Optimizer], Any]]] = {
    "StepLR": ("SGD", lambda o: schedulers.StepLR(o, 3)),
    "LambdaLR": ("SGD", lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step)),
    "CosineAnnealingLR": ("AdamW", lambda o: schedulers.CosineAnnealingLR(o, STEPS)),
    "OneCycleLR": ("AdamW", lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=STEPS + 1)),  # turns betas, too
    "ReduceLROnPlateau": ("SGD", lambda o: schedulers.ReduceLROnPlateau(o, patience=1)),
    "CyclicLR": ("SGD", lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3)),  # turns momentum, too
    "SequentialLR": (
        "Adam",
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.ExponentialLR(o, 0.8)], [4]
        ),
    ),
}
BASE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "betas": (0.8, 0.95)},
}


def scheduled(net: torch.nn.Module, optimizer: torch.optim.Optimizer, name: str, workers: tuple[int, ...]) -> Options:
    scheduler = SCHEDULES[name][1](optimizer)
    seen = []
    for step in range(STEPS):
        set_gradients(net, workers, step)
        optimizer.step()
        scheduler.step(*[1.0] if name == "ReduceLROnPlateau" else [])  # no progress at all
        seen.append({k: v for k, v in optimizer.param_groups[0].items() if k in ("lr", "betas", "momentum")})
    return seen


def schedule_all(job: tw.Job) -> None:
    """With the bits of the stock optimizer."""
    for name, (kind, _) in SCHEDULES.items():
        ours, theirs = model(), model()
        optimizer = getattr(torch.optim, kind)
        store = tw.torch.StoreOptimizer(ours.named_parameters(), optimizer, **BASE[kind])
        mine = scheduled(ours, store, name, (job.rank,))
        alone = scheduled(theirs, stock(theirs, optimizer, **BASE[kind]), name, WORKERS)
        assert same(state(ours), state(theirs)), name
        assert mine == alone, name
        assert len({options["lr"] for options in mine}) > 1, f"{name} changed nothing"


# ---- GradScaler


def scaled(net: torch.nn.Module, optimizer: torch.optim.Optimizer, unscale: bool) -> tuple[list[float], list[State]]:
    """A loop as in torch's own recipes; both workers see the same data, and an infinite loss in step 2."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    scales, states = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, 0, step)
        scaler.scale(loss * torch.inf if step == 2 else loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        states.append(state(net))
    return scales, states


def scale_twice(job: tw.Job) -> None:
    """A step with an inf is skipped."""
    for unscale in (True, False):
        ours, theirs = model(), model()
        options = {"lr": 0.1, "momentum": 0.9}
        mine, states = scaled(
            ours, tw.torch.StoreOptimizer(ours.named_parameters(), torch.optim.SGD, **options), unscale
        )
        # Without fused: torch would unscale inside of the fused step, in another order of operations.
        alone, expected = scaled(theirs, torch.optim.SGD(theirs.parameters(), **options, fused=unscale), unscale)
        assert mine == alone
        assert all(map(same, states, expected))
        assert mine[1:3] == [2.0**16, 2.0**15]
        assert same(states[1], states[2])
        assert not same(states[2], states[3])


def infinite_on_one(job: tw.Job, unscale: bool, more: dict[str, Any]) -> tuple[bool, list[float]]:
    """An infinite loss of worker 1 in step 2, and of worker 0 in the last."""
    ours, theirs = model(), model()
    options = {"lr": 0.1, "momentum": 0.9}
    store = tw.torch.StoreOptimizer(ours.named_parameters(), torch.optim.SGD, **options, **more)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    infinite = {(2, 1), (STEPS - 1, 0)}
    scales = []
    for step in range(STEPS):
        store.zero_grad()
        loss = loss_of(ours, job.rank, step)
        scaler.scale(loss * torch.inf if (step, job.rank) in infinite else loss).backward()
        if unscale:
            scaler.unscale_(store)
        scaler.step(store)
        scaler.update()
        scales.append(scaler.get_scale())
    optimizer = stock(theirs, torch.optim.SGD, **options)
    for step in range(STEPS):
        if step not in (2, STEPS - 1):
            set_gradients(theirs, WORKERS, step)
            optimizer.step()
    return same(state(ours), state(theirs)), scales


def test_an_inf_of_one_worker_is_skipped_by_all() -> None:
    cases: list[tuple[bool, dict[str, Any]]] = [
        (True, {}),
        (False, {"max_grad_norm": 1e9}),
        (False, {"error_if_nonfinite": True}),
    ]
    zero, one = run_job(for_each, infinite_on_one, cases).ok()
    assert zero == [(True, [2.0**16] * (STEPS - 1) + [2.0**15])] * 3
    assert one == [(True, [2.0**16] * 2 + [2.0**15] * (STEPS - 2))] * 3


# ---- hooks


def hooked(optimizer: torch.optim.Optimizer, net: torch.nn.Module, workers: tuple[int, ...]) -> list[str]:
    told: list[str] = []

    def pre(which: Any, args: Any, kwargs: Any) -> None:
        told.append("pre")
        for p in net.parameters():  # what a hook does to the gradients counts
            assert p.grad is not None
            p.grad.mul_(0.5)

    handles = [
        register_optimizer_step_pre_hook(lambda *_: told.append("every pre")),
        register_optimizer_step_post_hook(lambda *_: told.append("every post")),
        optimizer.register_step_pre_hook(pre),
        optimizer.register_step_post_hook(lambda *_: told.append("post")),
    ]
    for step in range(3):
        set_gradients(net, workers, step)
        optimizer.step()
    for handle in handles:
        handle.remove()
    set_gradients(net, workers, 3)
    optimizer.step()
    return told


def hook_twice(job: tw.Job) -> None:
    ours, theirs = model(), model()
    mine = hooked(tw.torch.StoreOptimizer(ours.named_parameters(), torch.optim.SGD, lr=0.1), ours, (job.rank,))
    alone = hooked(stock(theirs, torch.optim.SGD, lr=0.1), theirs, WORKERS)
    assert same(state(ours), state(theirs))
    assert mine == alone
    assert len(mine) == 12


def test_schedulers_scalers_and_hooks_do_as_with_the_stock_optimizer() -> None:
    run_job(in_turn, schedule_all, scale_twice, hook_twice).ok()


# ---- torch.compile


def compiled(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """A compiled function with everything in it; returns how many graphs dynamo made."""
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=graphs)
    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for step in range(4):
        train(torch.randn(16, 32, generator=torch.Generator().manual_seed(step)))
    return graphs.frame_count


def compile_twice(job: tw.Job, overlap: bool) -> tuple[bool, int]:
    import torch._dynamo.testing

    ours, theirs = model(), model()
    store = tw.torch.StoreOptimizer(ours.named_parameters(), torch.optim.SGD, lr=0.1, overlap=overlap)
    count = compiled(ours, store)
    torch._dynamo.reset()
    compiled(theirs, stock(theirs, torch.optim.SGD, lr=0.1))
    return same(state(ours), state(theirs)), count


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.long), True])
def test_torch_compile_around_a_step(overlap: bool) -> None:
    for equal, graphs in run_job(compile_twice, overlap).ok():
        assert equal
        assert 0 < graphs < 4  # made once, not once a step; and none of what the store does
