"""What cannot be right with parameters on a device: refused in one line, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tensorwire as tw
from tensorwire import errors
from tests.accelerator import models, simulated
from tests.accelerator.features import made
from tests.accelerator.programs import prepare
from tests.harness.jobs import in_turn, run_job

if why := simulated.unavailable():
    pytest.skip(why, allow_module_level=True)


def said(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def at_construction(job: tw.Job) -> list[str]:
    prepare(0)
    words = nn.Embedding(8, 4, sparse=True).to("sim:0")
    net = nn.Linear(4, 4).to("sim:0")
    whole = torch.zeros(8, device="sim:0")
    sharing = [("a", nn.Parameter(whole[:4])), ("b", nn.Parameter(whole[2:6]))]
    return [
        said(lambda: tw.torch.StoreOptimizer(words.named_parameters(), torch.optim.SGD, lr=0.1), errors.Unsupported),
        said(lambda: made(net, mode=tw.store.Async(), overlap=True), errors.Unsupported),
        said(lambda: tw.torch.StoreOptimizer(sharing, torch.optim.SGD, lr=0.1), errors.ArgumentError),
        said(lambda: tw.torch.place(nn.Sequential(net, nn.Linear(4, 4)), {"0": 0, "1": 0}), errors.Unsupported),
    ]


def in_steps(job: tw.Job) -> list[str]:
    """Each ends its optimizer for good."""
    prepare(0)

    def begun(**options: Any) -> tuple[nn.Module, tw.torch.StoreOptimizer]:
        model = models.built().to("sim:0")
        return model, made(model, **options)

    def backward(model: nn.Module) -> None:
        models.loss(model, 0, job.rank, "sim:0").backward()

    found = []
    model, optimizer = begun()
    loss = models.loss(model, 0, job.rank, "sim:0")
    simulated.capturing(True)
    found.append(said(loss.backward, errors.Unsupported))
    simulated.capturing(False)
    model, optimizer = begun()
    backward(model)
    optimizer.step()
    simulated.capturing(True)
    found.append(said(lambda: backward(model), errors.Unsupported))
    simulated.capturing(False)
    model, optimizer = begun()
    backward(model)
    found.append(said(lambda: backward(model), errors.GradientModified))
    model, optimizer = begun()
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
    found.append(said(optimizer.step, errors.GradientModified))
    model, optimizer = begun()
    scaler = torch.amp.GradScaler("sim")
    scaler.scale(models.loss(model, 0, job.rank, "sim:0")).backward()
    found.append(said(lambda: scaler.step(optimizer), errors.Unsupported))
    model, optimizer = begun(overlap=False)
    backward(model)
    with torch.no_grad():
        model.unused.add_(1)
    found.append(said(optimizer.step, errors.ParameterModified))
    model, optimizer = begun(overlap=False)
    backward(model)
    model.to("sim:1")
    found.append(said(optimizer.step, errors.ParameterModified))
    return found


@pytest.fixture(scope="module")
def found() -> list[list[str]]:
    ended = run_job(in_turn, at_construction, in_steps, workers=1, fresh=True)
    assert ended.results[0], ended.errors
    return ended.results[0]


def test_at_construction(found: list[list[str]]) -> None:
    sparse, mode, shared, cut = found[0]
    assert "sparse gradients on sim:0: build its embedding with sparse=False" in sparse
    assert "overlap=True works with mode=Sync()" in mode
    assert "share memory" in shared
    assert "on sim:0: only models with plain tensors on the CPU are cut over workers so far" in cut
    assert all("\n" not in text for text in (sparse, mode, shared, cut))


def test_in_steps(found: list[list[str]]) -> None:
    capture, forward, second, clipped, scaled, changed, moved = found[1]
    assert "a graph of the device's kernels is being captured" in capture
    assert forward == capture
    assert "second gradient" in second
    assert "no_sync()" in second
    assert "clip with StoreOptimizer(max_grad_norm=), or use overlap=False" in clipped
    assert "with overlap=True a GradScaler comes too late" in scaled
    assert "'unused' was changed in place" in changed
    assert "was moved out of the store's memory" in moved
