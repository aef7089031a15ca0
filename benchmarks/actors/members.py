"""Members of a job that the programs of a benchmark are: servers, and workers that ``tensorwire.init()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorwire.bench.actors import store_job
from tensorwire.bench.actors.lines import LEAVE, Lines, Run
from tensorwire.bench.actors.transfer import counts, since
from tensorwire.observe import spans
from tensorwire.observe.spans import clock


def serve(lines: Lines, index: int, device: str, workers: int, servers: int, interface: str) -> None:
    """A server's rounds, which it serves by itself; it tells what it counted in them."""
    thread = store_job.serve(lines, index, device, workers, servers, interface)
    before = counts()
    for run in lines.runs():
        if run.word == LEAVE:
            thread.join()  # the job is over: its trace is whole
            spans.write(f"server-{index}")
        lines.answer(**since(before))
        before = counts()


def steps(run: Run, step: Callable[[], Any]) -> tuple[float, float, float]:
    """Steps of training that warm up, and those that are timed: when these began and ended, and the last one's loss."""
    for _ in range(run.warm):
        step()
    start = clock()
    for _ in range(run.count):
        loss = step()
    return start, clock(), loss.item()


def train(
    lines: Lines,
    work: Callable[[Run], tuple[float, float, dict[str, float]]],
    leave: Callable[[], object],
    untimed: str,
) -> None:
    """A worker's rounds of training. A trace says when each began and ended, but for those of the word ``untimed``."""
    timed: list[tuple[float, float]] = []
    for run in lines.runs():
        if run.word == LEAVE:
            spans.facts["timed"] = timed  # between rounds a worker waits for the bench
            leave()
            lines.answer()
            continue
        start, stop, told = work(run)
        if run.word != untimed:
            timed.append((start, stop))
        lines.answer(stop - start, **told)


def run_member(
    role: str,
    index: str,
    device: str,
    workers: str,
    servers: str,
    interface: str,
    *,
    make: Callable[[], Callable[[Run], dict[str, float]]],
) -> None:
    """Runs a server, or a worker whose rounds are what ``make`` returns, until its input ends."""
    lines, sizes = Lines(), (int(workers), int(servers))
    if role == "server":
        serve(lines, int(index), device, *sizes, interface)
        return
    import tensorwire as tw

    store_job.join(lines, int(index), device, *sizes)
    tw.init()
    work = make()
    for run in lines.runs():
        before = counts()
        told = work(run)
        lines.answer(**told, **since(before))
