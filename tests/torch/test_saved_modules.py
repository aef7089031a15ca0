"""A whole model that is saved while it trains is plain PyTorch: nothing of Tensorwire is needed to load it."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorwire as tw
from tests.harness.jobs import run_job

LOAD = """
import sys
sys.modules["tensorwire"] = None
import torch
with torch.serialization.safe_globals([torch.nn.Linear, torch.nn.Sequential]):
    model = torch.load(sys.argv[1], weights_only=True)
model.load_state_dict(model.state_dict())
print(model(torch.ones(3)).tolist())
"""


def twice(module: torch.nn.Module, arguments: Any) -> Any:
    return (arguments[0] * 2,)


def save(job: tw.Job, path: str, overlap: bool) -> tuple[list[float], list[float]]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, overlap=overlap)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    torch.save(model, path)
    plain: list[float] = model(torch.ones(3)).tolist()
    model[0].register_forward_pre_hook(twice)  # of the user's own
    copied: list[float] = copy.deepcopy(model)(torch.ones(3) / 2).tolist()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"tensorwire.torch" not in buffer.getvalue()
    assert b"twice" in buffer.getvalue()
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})  # the model itself still has its hooks
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.wait()
    return plain, copied


@pytest.mark.parametrize("overlap", [False, True])
def test_a_saved_model_needs_no_tensorwire(overlap: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    ((plain, copied),) = run_job(save, path, overlap, workers=1).ok()
    assert copied == plain
    command = [sys.executable, "-c", LOAD, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(plain), done.stderr
