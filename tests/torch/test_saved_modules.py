"""A whole model that is saved while it trains is plain PyTorch: nothing of Tensorwire is needed to load it."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import tensorwire as tw
from tests.harness.jobs import for_each, run_job

LOAD = """
import sys
sys.modules["tensorwire"] = None
import torch
with torch.serialization.safe_globals([torch.nn.Linear, torch.nn.Sequential]):
    models = [torch.load(path, weights_only=True) for path in sys.argv[1:]]
for model in models:
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


def test_a_saved_model_needs_no_tensorwire(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("plain.pt", "overlap.pt")]
    (found,) = run_job(for_each, save, [(paths[0], False), (paths[1], True)], workers=1).ok()
    assert all(copied == plain for plain, copied in found)
    command = [sys.executable, "-c", LOAD, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [str(plain) for plain, _ in found], done.stderr
