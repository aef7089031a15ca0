"""``error_if_nonfinite``: a step with NaN or inf is an error everywhere, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire import errors
from tests.harness.jobs import for_each, in_turn, run_job

STEPS = 5
BAD = 2  # the step that is left out


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(3, 700, generator=generator)) for name in ("a.weight", "b", "late")}


def weights(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + step)
    return {name: torch.randn(3, 700, generator=generator) for name in ("a.weight", "b", "late")}


def backward(params: dict[str, torch.nn.Parameter], rank: int, step: int, bad: bool) -> None:
    mine = weights(rank, step)
    if bad and rank == 1:
        mine["b"][1, 5] = float("nan")
        mine["late"][0, 0] = float("inf")
    total = torch.zeros(())
    for name, p in params.items():
        total = total + (p * mine[name]).sum()
    total.backward()


def run(job: tw.Job, overlap: bool, options: dict[str, Any]) -> tuple[list[torch.Tensor], str, bool, int]:
    params = parameters()
    first = [(n, p) for n, p in params.items() if n != "late"]
    optimizer = tw.torch.StoreOptimizer(
        first, torch.optim.AdamW, lr=0.1, overlap=overlap, bucket_bytes=4096, error_if_nonfinite=True, **options
    )
    optimizer.add_param_group({"params": [("late", params["late"])]})
    told, same = "", False
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(params, job.rank, step, bad=step == BAD)
        before = [p.detach().clone() for p in params.values()]
        try:
            optimizer.step()
        except errors.NonFiniteGradient as error:
            told = str(error)
            same = all(torch.equal(p.detach(), b) for p, b in zip(params.values(), before, strict=True))
    optimizer.wait()
    state = optimizer.state_dict()["state"]
    return [p.detach().clone() for p in params.values()], told, same, int(state[0]["step"])


def reference(clip: float | None) -> list[torch.Tensor]:
    params = parameters()
    stock = torch.optim.AdamW(params.values(), lr=0.1, fused=True)
    for step in range(STEPS):
        if step == BAD:
            continue
        stock.zero_grad()
        for rank in range(2):
            backward(params, rank, step, bad=False)
        for p in params.values():
            assert p.grad is not None
            p.grad /= 2
        if clip:
            torch.nn.utils.clip_grad_norm_(params.values(), clip)
        stock.step()
    return [p.detach() for p in params.values()]


def test_a_step_with_nan_is_left_out_on_all_workers() -> None:
    cases: list[tuple[bool, dict[str, Any]]] = [(False, {}), (True, {}), (False, {"max_grad_norm": 1.0})]
    for found in run_job(for_each, run, cases, device="tcp", servers=2).ok():
        for (_, options), (values, told, same, steps) in zip(cases, found, strict=True):
            assert told == (
                "the norm of the gradients in step 3 is nan, and no parameter was changed: "
                "worker 1: 'b' has NaN, 'late' has inf"
            )
            assert same
            assert steps == STEPS - 1
            expected = reference(options.get("max_grad_norm"))
            if options:
                torch.testing.assert_close(values, expected)
            else:
                assert all(map(torch.equal, values, expected))


def too_large(job: tw.Job) -> None:
    """A norm that overflows is called so."""
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, error_if_nonfinite=True)
    p.grad = torch.full((2,), 1e200, dtype=torch.float64)
    own = "each worker's own gradients are finite, their sum of squares is not"
    with pytest.raises(errors.NonFiniteGradient, match=f"is inf.*{own}$"):
        optimizer.step()


def changed_between(job: tw.Job) -> None:
    """The options of a round are those that it began with: clipping that is set later counts in the next step."""
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, overlap=True)
    p.sum().backward()
    optimizer.max_grad_norm = 0.001
    optimizer.step()
    optimizer.wait()
    assert p.tolist() == [-1.0, -1.0]


def described(job: tw.Job) -> None:
    net = torch.nn.Linear(4, 2)
    groups = [
        {"params": [("weight", net.weight)], "weight_decay": 0.1},
        {"params": [("bias", net.bias)], "lr": 0.5},
    ]
    optimizer = tw.torch.StoreOptimizer(groups, torch.optim.SGD, lr=0.25, momentum=0.9, max_grad_norm=1.0)
    first, own, zero, one, server = repr(optimizer).splitlines()
    assert first == "StoreOptimizer of SGD: 2 tensors, 40 B, 1 bucket on 1 server"
    options = "overlap=False, reduce='mean', max_grad_norm=1.0, error_if_nonfinite=False"
    assert own == f"  {options}, mode=Sync(), compression=None"
    assert zero.startswith("  group 0, 1 tensor: weight_decay=0.1, lr=0.25, momentum=0.9")
    assert one.startswith("  group 1, 1 tensor: lr=0.5, momentum=0.9")
    assert server.startswith("  server 0 by shm: ")
    assert optimizer.summary() == "40 B in 2 tensors, 1 bucket on 1 server; 12 KiB registered on it"


def test_norms_and_what_an_optimizer_says() -> None:
    run_job(in_turn, too_large, changed_between, described, device="shm").ok()


def uncaught(job: tw.Job) -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = tw.torch.StoreOptimizer([("p", p)], torch.optim.SGD, lr=1.0, error_if_nonfinite=True)
    p.grad = torch.full((2,), float("nan") if job.rank == 1 else 0.0)
    optimizer.step()


def test_uncaught_it_ends_the_job_with_the_cause() -> None:
    ended = run_job(uncaught)
    assert "'p' has NaN" in str(ended.cause)
    assert all(e.startswith("NonFiniteGradient: ") for e in ended.errors)
