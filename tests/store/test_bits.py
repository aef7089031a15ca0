"""Sync training through the store has the bits of one process, over workers, servers, devices and optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tensorwire as tw
from tensorwire.store.rules import ELEMENTWISE, WHOLE, with_implementation
from tests.harness.jobs import for_each, run_job
from tests.levels import mostly_long

# Odd sizes, none, one, a scalar, and some that are cut into several buckets and over several servers.
SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (301, 257),
    "bias": (257,),
    "tiny": (1,),
    "scalar": (),
    "none": (0, 4),
    "kilo": (1024,),
    "tall": (2049, 33),
    "unused": (12, 5),
}
BUCKET = 32 << 10
STEPS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "AdamW": {"lr": 1e-2, "betas": (0.8, 0.99)},
}


def parameters(dtype: torch.dtype, seed: int, optimizer: str) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(SHAPES)
    if optimizer in WHOLE:  # torch's own refuse empty tensors, and Muon all but matrices
        shapes = {k: s for k, s in SHAPES.items() if 0 not in s and (optimizer != "Muon" or len(s) == 2)}
    return {k: torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for k, s in shapes.items()}


def gradient(name: str, shape: torch.Size, dtype: torch.dtype, rank: int, step: int) -> torch.Tensor | None:
    """Worker ``rank``'s gradient; one parameter is unused everywhere, one on all workers but the last to come."""
    if name == "unused" or (name == "bias" and rank == 1 and step == 1):
        return None
    seed = hash((len(name), rank, step)) % 2**31
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rate(step: int, base: float) -> float:
    return base / (1 + step)


def train(job: tw.Job, optimizer: str, options: dict[str, Any], dtype: str) -> dict[str, torch.Tensor]:
    kind = getattr(torch, dtype)
    # Every worker begins with values of its own: worker 0's must win.
    params = parameters(kind, seed=job.rank, optimizer=optimizer)
    store = tw.torch.StoreOptimizer(params.items(), getattr(torch.optim, optimizer), bucket_bytes=BUCKET, **options)
    for step in range(STEPS):
        for group in store.param_groups:
            group["lr"] = rate(step, options["lr"])
        for name, p in params.items():
            p.grad = gradient(name, p.shape, kind, job.rank, step)
        store.step()
    return {name: p.detach().clone() for name, p in params.items()}


def reference(workers: int, optimizer: str, options: dict[str, Any], dtype: str) -> dict[str, torch.Tensor]:
    """One process, whole tensors, gradients summed in worker order; float32 masters for half precision."""
    kind = getattr(torch, dtype)
    params = parameters(kind, seed=0, optimizer=optimizer)
    masters = {k: torch.nn.Parameter(p.detach().float()) if kind.itemsize == 2 else p for k, p in params.items()}
    cls = getattr(torch.optim, optimizer)
    stock = cls(list(masters.values()), **with_implementation(cls, options))
    for step in range(STEPS):
        for group in stock.param_groups:
            group["lr"] = rate(step, options["lr"])
        for name, m in masters.items():
            found = [gradient(name, m.shape, kind, rank, step) for rank in range(workers)]
            there = [g.to(m.dtype) for g in found if g is not None]
            m.grad = None
            if there:
                total = there[0].clone()
                for g in there[1:]:
                    total += g
                m.grad = total / workers
        stock.step()
    return {name: m.detach().to(kind) for name, m in masters.items()}


def assert_same(ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], case: object) -> None:
    assert ours.keys() == stock.keys()
    for name, value in ours.items():
        assert torch.equal(value, stock[name]), f"{case}: {name}: {(value - stock[name]).abs().max()}"


def check(workers: int, servers: int, device: str, cases: list[tuple[str, dict[str, Any], str]]) -> None:
    results = run_job(for_each, train, cases, workers=workers, servers=servers, device=device).ok()
    for at, case in enumerate(cases):
        expected = reference(workers, *case)
        for mine in results:
            assert_same(mine[at], expected, case)


EVERY = [(workers, servers, "shm") for workers in (1, 2, 3, 4) for servers in (1, 2, 3)]
FEW = ((2, 1, "shm"), (3, 2, "tcp"), (4, 3, "shm"))
SOME = [(workers, servers, "tcp") for workers, servers in ((2, 1), (3, 2), (4, 3))]


@pytest.mark.parametrize(("workers", "servers", "device"), mostly_long(EVERY + SOME, FEW))
def test_bits_over_workers_servers_and_devices(workers: int, servers: int, device: str) -> None:
    cases = [("SGD", OPTIONS["SGD"], "float32"), ("AdamW", OPTIONS["AdamW"], "bfloat16")]
    check(workers, servers, device, cases)


@pytest.mark.parametrize("device", mostly_long(["shm", "tcp"], ["shm"]))
def test_bits_of_every_optimizer(device: str) -> None:
    cases = [(name, OPTIONS.get(name, {"lr": 0.01}), "float32") for name in (*ELEMENTWISE, *WHOLE)]
    check(2, 2, device, cases)


def test_bits_of_other_dtypes_and_of_implementations_that_the_user_chose() -> None:
    nesterov = {"lr": 0.1, "nesterov": True, "momentum": 0.5}
    kinds = ("float64", "float16", "bfloat16")
    chosen: list[dict[str, Any]] = [{"lr": 0.01, "foreach": True}, {"lr": 0.01, "fused": False}]
    cases = [case for dtype in kinds for case in (("Adam", OPTIONS["Adam"], dtype), ("SGD", nesterov, dtype))]
    check(2, 2, "shm", cases + [("Adam", options, "float32") for options in chosen])
