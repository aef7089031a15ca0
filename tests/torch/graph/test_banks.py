"""Memory that runs of a graph share: who may overwrite what, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorwire.device import Device, LoopbackDevice, TcpDevice
from tensorwire.graph import analyze
from tensorwire.graph.kinds import DYNAMIC
from tensorwire.graph.worker_group import WorkerGroup
from tensorwire.observe import counters
from tensorwire.torch.graph.capture.importer import InputOrigin
from tests.torch.graph.graphs import WORKERS, Runs, captured, moved
from tests.torch.graph.together import Together

devices = pytest.mark.parametrize("device", [LoopbackDevice, TcpDevice])


@devices
def test_a_parameter_may_change_once_nobody_reads_it(device: Callable[[], Device]) -> None:
    """Worker 0's run ends, so that an optimizer may change its parameter, only after worker 1's."""
    weight = torch.ones(64, 64)
    module = captured(lambda w: (w.view(-1),), [weight])
    analysis = analyze(moved(module, InputOrigin("parameter", WORKERS[:1])))
    assert [edge.lent for edge in analysis.plan.edges] == [True]
    changed = threading.Event()

    def late(results: Any) -> float:
        changed.wait(1.0)  # time for worker 0 to change it and to lend it again, if nothing keeps it
        return float(results[0].sum())

    def run(group: WorkerGroup) -> list[float]:
        runs = Runs(group, module, analysis)
        found = []
        for step in range(2):
            if group.me == WORKERS[0]:
                runs(weight, use=lambda results: None)
                weight.fill_(step + 2)
                if step:
                    changed.set()
            else:
                found.append(runs(weight, use=late))
        return found

    with Together(2, device) as together:
        assert together.each(run)[1] == [64 * 64, 2 * 64 * 64]


@devices
def test_tensors_of_any_size_stay_while_somebody_looks_at_them(device: Callable[[], Device]) -> None:
    """Worker 1 keeps what it made in every second run; the memory of the others is used again."""
    module = captured(lambda x: ((x + 1).t(),), [torch.ones(3, 5)], symbolic=True)
    analysis = analyze(moved(module, InputOrigin("saved", WORKERS[:1])))
    assert [edge.kind for edge in analysis.plan.edges] == [DYNAMIC]
    sizes = [7, 0, 100, 3000, 1, 64, 2, 900, 5, 31]

    def run(group: WorkerGroup) -> list[torch.Tensor]:
        runs = Runs(group, module, analysis)
        results = [runs(torch.full((size, 5), float(step))) for step, size in enumerate(sizes)]
        kept = [result[0] for result in results]
        del results
        del kept[1::2]
        for step in range(8):
            runs(torch.full((1000, 5), -1.0 - step), use=lambda results: None)
        return kept

    with Together(2, device) as together:
        kept = together.each(run)[1]
        for step, (values, size) in enumerate(zip(kept, sizes[::2], strict=True)):
            assert torch.equal(values, torch.full((5, size), 2.0 * step + 1))


@devices
def test_memory_of_tensors_of_any_size_is_used_again(device: Callable[[], Device]) -> None:
    module = captured(lambda x: ((x + 1).t(),), [torch.ones(3, 5)], symbolic=True)
    analysis = analyze(moved(module, InputOrigin("saved", WORKERS[:1])))

    step_by_step = threading.Barrier(2)  # a worker that runs ahead would need more memory

    def run(group: WorkerGroup) -> int:
        runs = Runs(group, module, analysis)
        for step in range(20):
            step_by_step.wait(60.0)
            runs.edges.drain(60.0)  # so would one that is not told yet that its tensor was read
            if step == 10:
                before = counters.snapshot()
            runs(torch.ones(50_000 + step, 5), use=lambda results: None)
        return counters.since(before).registrations

    with Together(2, device) as together:
        assert together.each(run) == [0, 0]
