"""An arm's side of the contest: it answers what it is asked for, and in between leaves the device to others."""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from tensorwire.observe import counters
from tests.gpu.devices import Ticks
from tests.gpu.programs import answer

COMPUTE, STEPS = "compute", "steps"


@dataclass(frozen=True)
class Arm:
    """One who trains. ``compute``: forward and backward alone. ``settle``: returns when its last step is all done."""

    compute: Callable[[int], Tensor]
    step: Callable[[int], Tensor]
    clear: Callable[[], object]
    settle: Callable[[], object]
    keeps: str
    note: str = ""


def take_turns(pipe: Connection, arm: Arm, device: torch.device, warm: int) -> None:
    """Answers how it came up, then each request, until there is none."""
    built = torch.accelerator.memory_allocated(device)
    loss = torch.zeros(())
    for number in range(warm):
        loss = arm.step(number)
    rest(arm, device)
    at_rest = torch.accelerator.memory_allocated(device)
    answer(pipe, {"keeps": arm.keeps, "note": arm.note, "built": built, "at_rest": at_rest, "loss": float(loss)})
    while (request := pipe.recv()) is not None:
        what, count = request
        answer(pipe, timed(arm, arm.compute if what == COMPUTE else arm.step, device, count))


def timed(arm: Arm, call: Callable[[int], Tensor], device: torch.device, count: int) -> dict[str, Any]:
    """``count`` steps after one that nobody times: their seconds, host waits, and memory."""
    torch.accelerator.reset_peak_memory_stats(device)
    ticks, waits = Ticks(device), []
    loss = torch.zeros(())
    for number in range(count + 1):
        loss = call(number)
        if call == arm.compute:
            arm.clear()
        ticks.mark()
        waits.append(counters.host_waits)
    rest(arm, device)
    peak = torch.accelerator.max_memory_allocated(device)
    each = [after - before for before, after in itertools.pairwise(waits)]
    return {
        "seconds": ticks.seconds(),
        "host_waits": statistics.median(each),
        "most_host_waits": max(each),
        "peak": peak,
        "loss": float(loss),
    }


def rest(arm: Arm, device: torch.device) -> None:
    """Nothing of it runs, and it holds no more of the device's memory than it has to."""
    arm.settle()
    torch.accelerator.synchronize(device)
    gc.collect()
    torch.accelerator.empty_cache()
