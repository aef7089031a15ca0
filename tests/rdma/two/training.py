"""What workers run: synchronous training on scikit-learn's digits, the same bits every time."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH = 64
STEPS = 24
CUT_AT = Path("/run/tmp/cut-at")  # when worker 0 cut the cable, on its guest's clock


@dataclass(frozen=True)
class Trained:
    """What a worker has to say at the end."""

    digest: str  # of all parameters
    loss: float
    route: str  # the device it reached the server by
    payload: int  # bytes that it handed to a device while it trained
    messages: int


def train(job: Any, cut: int = 0, die: int = 0) -> Trained:
    """Trains; worker 0 cuts its own cable before step ``cut``, or worker 1 is killed there by SIGKILL (``die``)."""
    import torch
    from sklearn.datasets import load_digits

    import tensorwire as tw
    from tensorwire.observe import counters

    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.AdamW, lr=3e-3)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    mine = order[job.rank :: job.num_workers]
    before = counters.snapshot()
    for step in range(1, STEPS + 1):
        if step == cut and job.rank == 0:
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            CUT_AT.write_text(str(time.monotonic()))
        if step == die and job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        rows = mine[(step - 1) * BATCH % len(mine) :][:BATCH]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
    sent = counters.since(before)
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().numpy().tobytes())
    return Trained(total.hexdigest(), loss.item(), job.routes["server 0"].device, sent.bytes, sent.messages)
