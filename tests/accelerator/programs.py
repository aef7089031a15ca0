"""Programs of jobs on the simulated accelerator, and what they have to give: what they give on the CPU."""

from __future__ import annotations

import contextlib
from enum import Enum
from typing import Any

import torch

import tensorwire as tw
from tensorwire.torch import page_locking
from tests.accelerator import models, simulated
from tests.accelerator.left_out import Late, late

STEPS = 4
BUCKET = 4096
Found = list[torch.Tensor]  # on the CPU


class Driver(Enum):
    """What memory that others allocated the device page-locks."""

    ALL, WRITABLE, NONE = range(3)


def _lock(address: int, nbytes: int, read_only: bool) -> None:
    simulated.register(address, nbytes)


def _lock_writable(address: int, nbytes: int, read_only: bool) -> None:
    if read_only:
        raise RuntimeError("read-only memory")
    simulated.register(address, nbytes)


def prepare(seed: int, *, driver: Driver = Driver.ALL) -> None:
    """The device is there, with a schedule."""
    simulated.load()
    torch.set_num_threads(1)
    simulated.settle()
    simulated.schedule(seed)
    page_locking.DRIVERS.pop("sim", None)
    if driver is not Driver.NONE:
        lock = _lock if driver is Driver.ALL else _lock_writable
        page_locking.DRIVERS["sim"] = lambda: page_locking.Driver(lock, simulated.unregister)


def train(
    job: tw.Job,
    on: str = "sim:0",
    seed: int = 0,
    *,
    driver: Driver = Driver.ALL,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
    to_none: bool = True,
    elsewhere: bool = False,
    held: bool = False,
    **options: Any,
) -> Found:
    """Losses, reads and values of a training.

    ``elsewhere``: after each step, the host reads new values on another stream. ``held``: the host goes on to the next
    step's first work before it waits for copies of this one's gradients.
    """
    prepare(seed, driver=driver)
    model = models.built(dtype).to(on)
    found: Found = []
    options = {"lr": 0.01, "bucket_bytes": BUCKET, **options}
    optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.AdamW, **options)
    with late() if held and on != "cpu" else contextlib.nullcontext(Late()) as gate:
        for n in range(steps):
            loss = models.loss(model, n, job.rank, on)
            if held:
                optimizer.wait()  # for all of the step before, which the gate must not hold
                gate.hold()
            loss.backward()
            found += models.read(model)
            optimizer.step()
            found.append(loss.detach())
            optimizer.zero_grad(set_to_none=to_none)
            if held:
                _work(on)
            gate.go_on()
            if elsewhere:
                with contextlib.nullcontext() if on == "cpu" else torch.Stream(on):
                    found += [each.cpu() for each in models.read(model)]
    optimizer.wait()
    found += [p.detach().clone() for p in model.parameters()]
    optimizer.close()
    assert simulated.registered() == 0
    return [each.cpu() for each in found]


def _work(on: str) -> None:
    """Memory that was given back is used again, and the host waits for that."""
    for count in (16, 32, 48, 256, 512, 768, 1024, 2048, 4096):
        for _ in range(4):
            torch.full((count,), 7.0, device=on)
    if on != "cpu":
        torch.accelerator.current_stream().synchronize()


def same(ours: Found, theirs: Found) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
