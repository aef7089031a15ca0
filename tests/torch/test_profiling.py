"""torch.profiler shows our ranges where they were."""

from __future__ import annotations

import torch

import tensorwire as tw
from tensorwire.observe import ranges
from tests.harness.jobs import run_job


def profiled(job: tw.Job) -> dict[str, int]:
    from torch.profiler import ProfilerActivity, profile

    model = torch.nn.Linear(8, 8)
    optimizer = tw.torch.StoreOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(3):
            step()
            with ranges.named("tensorwire.test"):
                torch.ones(3)
    step()
    return {event.key: event.count for event in seen.key_averages() if event.key.startswith("tensorwire.")}


def test_the_profiler_shows_what_a_step_spends_on_the_store() -> None:
    for found in run_job(profiled).ok():
        assert found == {ranges.PUSH: 3, ranges.WAIT: 3, "tensorwire.test": 3}


def test_ranges_are_nothing_where_nobody_looks() -> None:
    import tensorwire.torch.profiling as profiling

    assert profiling._open(ranges.PUSH) is profiling._open(ranges.WAIT)
    opened: list[str] = []
    try:
        ranges.shown_by(lambda name: opened.append(name) or ranges._nothing)  # type: ignore[func-returns-value]
        with ranges.named("a"):
            pass
        ranges.shown_by(None)
        with ranges.named("b"):
            pass
    finally:
        profiling.show_ranges()
    assert opened == ["a"]
