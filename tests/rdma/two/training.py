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
class Read:
    """What the reader on worker 1's machine has to say."""

    route: str  # the device it reached the publisher by
    reads: int
    versions: int


def train_and_read(job: Any, reads: int) -> Read | None:
    """All elements count the steps. A reader on worker 1's machine reads version after version meanwhile."""
    import threading

    import torch

    import tensorwire as tw

    params = [(f"p{i}", torch.nn.Parameter(torch.zeros(size))) for i, size in enumerate((9000, 5, 7000))]
    optimizer = tw.torch.StoreOptimizer(params, "sum", publish=tw.store.Every(1), bucket_bytes=16384)
    for _, p in params:
        p.grad = torch.ones_like(p)
    over, found, failed = threading.Event(), [], []

    def read() -> None:
        seen = [0]
        try:
            with tw.store.connect(os.environ["TENSORWIRE_COORDINATOR"]) as reader:
                for _ in range(reads):
                    version, tensors = reader.pull(max(1, seen[-1]))
                    values = {float(v) for t in tensors.values() for v in (t.min(), t.max())}
                    assert values == {float(version.step)}, (version, values)
                    assert version.counter >= seen[-1]
                    seen.append(version.counter)
                found.append(Read(reader.route, reads, len(set(seen))))
        except BaseException as error:
            failed.append(error)
        over.set()

    if job.rank == 1:
        threading.Thread(target=read).start()
    while not job.broadcast(float(over.is_set()), source=1):
        optimizer.step()
    if failed:
        raise failed[0]
    optimizer.close()
    return found[0] if found else None


def read_and_push_files(job: Any, pushes: int) -> Read | None:
    """A key counts the pushes, which a process on worker 1's machine makes by writing, and reads versions meanwhile."""
    import threading

    import numpy as np

    import tensorwire as tw

    kv = tw.store.KeyValue(tw.store.Async(), "sum", publish=True)
    kv.init("w", np.zeros(50_000, "f4"))
    kv.publish()
    over, found, failed = threading.Event(), [], []

    def use() -> None:
        seen = [0.0]
        try:
            with tw.files.connect(os.environ["TENSORWIRE_COORDINATOR"]) as folder:
                while not folder.exists("params/w"):
                    time.sleep(0.01)
                with folder.open("push/w", "wb") as file:
                    for _ in range(pushes):
                        file.pwrite(np.ones(50_000, "f4"), 0)
                        file.fsync()
                        with folder.open("params/w") as values:
                            array = np.frombuffer(values.read(), "f4")
                        assert (array == array[0]).all()
                        assert array[0] >= seen[-1]
                        seen.append(float(array[0]))
                found.append(Read(folder._published.source.device, pushes, len(set(seen))))
        except BaseException as error:
            failed.append(error)
        over.set()

    if job.rank == 1:
        threading.Thread(target=use).start()
    while not job.broadcast(float(over.is_set()), source=1):
        kv.publish()
    if failed:
        raise failed[0]
    assert (kv.pull("w").wait() == pushes).all()
    kv.close()
    return found[0] if found else None


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


@dataclass(frozen=True)
class Parted:
    """What a worker has to say of a model whose parts run on both workers."""

    losses: list[float]
    wrong: list[str]  # gradients that are not those of one process
    here: list[str]  # the parameters that had a gradient here
    route: str
    sent: int  # bytes in the last step
    asked: int  # RPCs and registrations in the last step
    copies: int


def train_parted(job: Any) -> Parted:
    """A small transformer, its second layer on worker 1; each worker trains the same model by itself as well."""
    import copy

    import torch

    from tensorwire.observe import counters

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 4))
    alone = copy.deepcopy(model)
    workers = {"": 0, "1": 1}
    compiled = torch.compile(model, backend="tensorwire", options={"workers": workers})
    losses, wrong, here, last = [], [], [], None
    for step in range(4):
        x = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(step))
        before = counters.snapshot()
        loss = compiled(x).square().mean()
        loss.backward()
        last = counters.since(before)
        right = alone(x).square().mean()
        right.backward()
        losses.append(loss.item())
        if not torch.equal(loss, right):
            wrong.append(f"step {step}: loss")
        for (path, mine), its in zip(model.named_parameters(), alone.parameters(), strict=True):
            if mine.grad is not None and not torch.equal(mine.grad, its.grad):
                wrong.append(f"step {step}: {path}")
        here = [path for path, parameter in model.named_parameters() if parameter.grad is not None]
        for one in (model, alone):
            with torch.no_grad():
                for parameter in one.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad
            one.zero_grad()
    assert last is not None
    route = job.routes[f"worker {1 - job.rank}"].device
    asked = last.rpcs + last.registrations
    return Parted(losses, wrong, here, route, last.bytes, asked, last.copies)
