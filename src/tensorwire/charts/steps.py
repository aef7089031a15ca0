"""A picture of a step: each process's activities over time, and the parts of each worker's typical step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tensorwire.charts.figure import OUTLINE, PART_NAMES, PART_STYLES, check_picture, save_picture
from tensorwire.errors import ArgumentError
from tensorwire.sizes import counted
from tensorwire.trace.intervals import common
from tensorwire.trace.parts import PARTS, WARM_UP_STEPS, Parts, ProcessTrace, Step, steps_of_trace, typical

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OPTION = "--plot"


def median_step(steps: Sequence[Step]) -> int:
    """The number of a step of median length, all workers together, after the first few."""
    seconds: dict[int, list[float]] = {}
    for step in steps:
        seconds.setdefault(step.step, []).append(step.stop - step.start)
    numbers = sorted(seconds)
    kept = numbers[WARM_UP_STEPS:] or numbers
    if not kept:
        raise ArgumentError("the trace holds no whole step")
    return sorted(kept, key=lambda n: statistics.fmean(seconds[n]))[len(kept) // 2]


def plot_steps(path: str | Path, trace: Mapping[str, ProcessTrace], *, of: str = "") -> None:
    """Draws the picture.

    Args:
        path: The picture; its suffix says its format.
        trace: What each process did, by its name.
        of: Which trace this is and when it was recorded; stands above the picture, with the number of processes.

    Raises:
        ArgumentError: It cannot be drawn, or the trace holds no whole step.
        MissingPackage: matplotlib is not installed.
    """
    check_picture(path, option=_OPTION)
    from matplotlib.figure import Figure

    steps = steps_of_trace(trace)
    number = median_step(steps)
    chosen = [s for s in steps if s.step == number]
    servers = sorted(name for name in trace if name.startswith("server-"))
    rows = len({s.worker for s in chosen}) + len(servers)
    figure = Figure(figsize=(10, 2.6 + 0.42 * rows + 0.36 * len({s.worker for s in steps})), layout="constrained")
    counts = [counted(len({s.worker for s in steps}), "worker"), counted(len(servers), "server")]
    # Dollars would be formulas.
    figure.suptitle(
        " · ".join([*filter(None, [of]), ", ".join(counts)]), ha="left", x=0.01, fontsize=11, parse_math=False
    )
    above, below = figure.subplots(2, 1, height_ratios=[rows + 1, len({s.worker for s in steps}) + 1])
    _draw_step(above, chosen, {name: trace[name] for name in servers}, number)
    _draw_parts(below, [s.parts() for s in steps])
    save_picture(figure, path, option=_OPTION)


def _draw_step(axes: Axes, steps: Sequence[Step], servers: Mapping[str, ProcessTrace], number: int) -> None:
    """Each process's time in one step; what is hidden is a narrow bar below compute."""
    start, stop = min(s.start for s in steps), max(s.stop for s in steps)
    labels = [f"worker {w}" for w in sorted({s.worker for s in steps})]
    for step in steps:
        row = labels.index(f"worker {step.worker}")
        for part in PARTS:
            place = (row - 0.36, 0.54) if part != "hidden" else (row + 0.2, 0.18)
            _bars(axes, part, step.when[part], place, start)
    for name, record in servers.items():
        labels.append(name.replace("-", " "))
        updates = [(s.start, s.stop) for s in record.on_one_clock() if s.name == "update"]
        _bars(axes, "update", common(updates, [(start, stop)]), (len(labels) - 1 - 0.36, 0.54), start)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.6)
    axes.set_xlim(0, (stop - start) * 1e3)
    axes.set_xlabel("ms")
    axes.set_title(f"round {number}, of median length", loc="left", fontsize=10)


def _bars(
    axes: Axes, part: str, intervals: Sequence[tuple[float, float]], place: tuple[float, float], start: float
) -> None:
    bars = [((a - start) * 1e3, (b - a) * 1e3) for a, b in intervals]
    axes.broken_barh(bars, place, **PART_STYLES[part], **OUTLINE)


def _draw_parts(axes: Axes, parts: Sequence[Parts]) -> None:
    """Each worker's typical step as one bar."""
    workers = sorted({p.worker for p in parts})
    for row, worker in enumerate(workers):
        own = [p for p in parts if p.worker == worker]
        step = typical(own, skip=WARM_UP_STEPS if len(own) > WARM_UP_STEPS else 0)
        left = 0.0
        for part in PARTS:
            seconds = getattr(step, part) * 1e3
            at, height, shift = (left, 0.54, -0.36) if part != "hidden" else (0.0, 0.18, 0.2)
            axes.barh(row + shift, seconds, height, left=at, align="edge", **PART_STYLES[part], **OUTLINE)
            left += seconds if part != "hidden" else 0.0
    axes.set_yticks(range(len(workers)), [f"worker {w}" for w in workers])
    axes.set_ylim(len(workers) - 0.5, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms")
    axes.set_title("the typical step", loc="left", fontsize=10)
    _legend(axes)


def _legend(axes: Axes) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(**PART_STYLES[part], **OUTLINE, label=PART_NAMES.get(part, part)) for part in PARTS]
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=8)
