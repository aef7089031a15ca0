"""What ``train`` and ``graph`` print besides their figures: the parts of a step, the sizes of tensors, a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorwire.bench.models import MODELS, Model
from tensorwire.bench.records import Record, time_text
from tensorwire.charts.figure import OUTLINE, PART_NAMES, PART_STYLES, save_picture
from tensorwire.sizes import size_text
from tensorwire.tables import print_table

MIB = 2**20
PARTS = ("compute", "update", "exposed", "idle")  # they add up to a step


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table, with its title above."""
    print()
    print_table(head, rows, left=range(len(head)), title=title)


def markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The same for a page of documentation."""
    print(f"\n{title}\n")
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")


STEP_TITLE = "Where a step's time went (overhead: over the same workers without a store)"
STEP_HEAD = ("what", "who", "step", "overhead", *PARTS, "hidden", "samples/s", "loss")


def step_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """A row a record of a step of training."""
    rows = []
    before = ""
    for record in records:
        details = record.details or {}
        what, before = ("" if record.workload == before else record.workload), record.workload
        whole = sum(details.get(name, 0.0) for name in PARTS)
        shares = [_share(details, name, whole) for name in (*PARTS, "hidden")]
        if "hidden_share" in details:
            shares[-1] = f"{details['hidden_share']:.0%} of communication"
        overhead = f"{details['overhead']:+.1%}" if "overhead" in details else ""
        end = (f"{details.get('samples_per_second', 0):,.1f}", f"{details.get('loss', 0):.6f}")
        rows.append((what, record.peer, time_text(record.seconds), overhead, *shares, *end))
    return rows


def _share(details: Mapping[str, float], name: str, whole: float) -> str:
    return (
        f"{time_text(details[name])} ({details[name] / whole:.1%})"
        if details.get(name)
        else "0"
        if name in details
        else ""
    )


SIZES_TITLE = "How big the tensors are (float32)"
SIZES_HEAD = ("workload", "MiB", "tensors", "parameters", "mean", "median", "largest", "< 4 KiB", ">= 1 MiB")


def size_rows(models: Sequence[Model] = tuple(MODELS.values())) -> list[tuple[str, ...]]:
    """A row a workload, whether it was measured or not."""
    return [
        (
            m.title,
            f"{m.nbytes / MIB:.2f}",
            str(len(m.tensors)),
            f"{m.parameters:,}",
            *(size_text(n) for n in (m.mean, m.median, m.largest)),
            str(m.small),
            str(m.large),
        )
        for m in models
    ]


# ---- the chart


def chart(records: Sequence[Record], path: str, machine: Sequence[str]) -> None:
    """One bar per record: the parts of its step on top of each other, hidden communication beside.

    A contender without a trace has an empty bar, because only its step is known. Raises `ArgumentError` for a file that
    cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 + 0.42 * len(records) + 0.3 * len(machine)), layout="constrained")
    axes = figure.add_subplot()
    places: list[float] = []
    at, before = 0.0, ""
    for record in records:
        at += 1.0 if record.workload == before else 1.8  # a heading has its place
        if record.workload != before:
            axes.text(0, at - 0.62, record.workload, fontsize=9, fontweight="bold", va="center")
        before = record.workload
        _bar(axes, at, record)
        places.append(at)
    axes.set_yticks(places, [record.peer for record in records])
    axes.set_ylim(at + 0.7, 0.6)
    axes.set_xlabel("milliseconds a step")
    axes.margins(x=0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _legend(figure, records)
    figure.supxlabel("\n".join(machine), fontsize=6)
    save_picture(figure, path, option="--report")


def _bar(axes: Any, at: float, record: Record) -> None:
    details = record.details or {}
    end = 0.0
    if "compute" not in details:
        axes.barh(at, record.seconds * 1e3, height=0.6, facecolor="white", **OUTLINE)
        end = record.seconds * 1e3
    for name in PARTS if "compute" in details else ():
        width = details[name] * 1e3
        if not width:
            continue
        axes.barh(at, width, left=end, height=0.6, **PART_STYLES[name], **OUTLINE)
        end += width
    if details.get("hidden"):
        axes.barh(at + 0.4, details["hidden"] * 1e3, height=0.2, **PART_STYLES["hidden"], **OUTLINE)
    axes.text(end, at, f" {time_text(record.seconds)}", va="center", fontsize=8)


def _legend(figure: Any, records: Sequence[Record]) -> None:
    """What of it there is in the bars."""
    from matplotlib.patches import Patch

    details = [record.details or {} for record in records]
    drawn = [part for part in (*PARTS, "hidden") if any(one.get(part) for one in details)]
    patches = [Patch(**PART_STYLES[part], **OUTLINE, label=PART_NAMES.get(part, part)) for part in drawn]
    if any("compute" not in one for one in details):
        patches.append(Patch(facecolor="white", **OUTLINE, label="not divided"))
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), fontsize=8, frameon=False)
