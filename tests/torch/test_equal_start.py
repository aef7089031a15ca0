"""Buffers and left-out parameters begin with worker 0's values, as with `DistributedDataParallel`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import tensorwire as tw
from tests.harness.jobs import run_job

DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


class Net(torch.nn.Module):
    """A frozen layer, buffers of several dtypes, and one layer to train; drawn anew on each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(2, 3).requires_grad_(False)
        self.head = torch.nn.Linear(3, 1)
        self.extra = torch.nn.Module()
        for dtype in DTYPES:
            self.extra.register_buffer(f"of_{str(dtype)[6:]}", torch.randn(40).clamp(min=0).mul(9).to(dtype))
        self.extra.register_buffer("short-lived", torch.randn(4, 3).T, persistent=False)
        self.extra.register_buffer("none", None)


def others(net: Net) -> dict[str, torch.Tensor]:
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {n: t.clone() for n, t in tensors.items() if not n.startswith("head")}


def trainable(net: torch.nn.Module, prefix: str = "") -> list[tuple[str, torch.nn.Parameter]]:
    return [(prefix + n, p) for n, p in net.named_parameters() if p.requires_grad]


GIVEN: list[Callable[[Net], Any]] = [
    lambda net: net,
    lambda net: trainable(net),
    lambda net: trainable(net, "net."),
    lambda net: [(str(i), p) for i, (_, p) in enumerate(trainable(net))],
]


def constructed(job: tw.Job) -> list[Any]:
    torch.manual_seed(job.rank)
    found = []
    for mode in (tw.store.Sync(), tw.store.LocalSGD()):
        for given in GIVEN:
            net = Net()
            before = others(net)
            tw.torch.StoreOptimizer(given(net), torch.optim.SGD, lr=0.1, mode=mode)
            found.append((before, others(net)))
    return found


def test_buffers_and_frozen_parameters_begin_with_worker_0s_values() -> None:
    first, second = run_job(constructed).ok()
    for (before, after), (other, others_after) in zip(first, second, strict=True):
        assert len(before) == len(DTYPES) + 3
        for name, value in before.items():
            assert not torch.equal(other[name], value), name
            assert torch.equal(after[name], value), name
            assert torch.equal(others_after[name], value), name


def what_stays(job: tw.Job) -> Any:
    torch.manual_seed(job.rank)
    net = Net()
    net.register_buffer("shape", torch.randn(2 + job.rank))
    net.register_buffer("sparse", torch.eye(2).to_sparse())
    if job.rank:
        net.register_buffer("own", torch.randn(2))
    before = others(net)
    head, rest = net.head.named_parameters("head"), net.frozen.requires_grad_(True).named_parameters("frozen")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        local = tw.torch.StoreOptimizer(rest, torch.optim.SGD, lr=0.1, mode=tw.store.LocalSGD(every=9))
        net.frozen(torch.full((1, 2), 1.0 + job.rank)).sum().backward()
        local.step()
        trained = net.frozen.weight.clone()
        tw.torch.StoreOptimizer(head, torch.optim.SGD, lr=0.1)
    assert torch.equal(net.frozen.weight, trained)
    same = {n: torch.equal(before[n].to_dense(), t.to_dense()) for n, t in others(net).items() if "." not in n}
    return [str(w.message) for w in found], same


def test_what_another_optimizer_trains_stays_and_what_cannot_travel_is_named() -> None:
    (zero, _), (one, same) = run_job(what_stays).ok()
    assert same == {"shape": True, "sparse": True, "own": True}
    assert any("'sparse'" in text and "to_dense" in text for text in zero)
    assert any("'shape'" in text for text in one)
    assert not any("own" in text.split("'")[1::2] for text in zero + one)
