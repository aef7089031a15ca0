"""What benchmarks of whole steps print besides their figures: tables, the parts of a step, a chart of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensorwire.bench.records import Record, time_text
from tensorwire.charts.figure import OUTLINE, PART_NAMES, PART_STYLES, save_picture
from tensorwire.tables import print_table

PARTS = ("compute", "update", "exposed", "idle")  # they add up to a step


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool) -> None:
    """A table, with its title above; for a terminal, or for a page of documentation."""
    print()
    if not markdown:
        print_table(head, rows, left=range(len(head)), title=title)
        return
    print(f"{title}\n")
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")


def grouped(records: Sequence[Record]) -> Iterator[tuple[str, Record]]:
    """Each with its workload, or '' where the one before has the same."""
    before = ""
    for record in records:
        yield "" if record.workload == before else record.workload, record
        before = record.workload


STEP_TITLE = "Where a step's time went (overhead: over the same workers without a store)"
STEP_HEAD = ("what", "who", "step", "overhead", *PARTS, "hidden", "samples/s", "loss")


def step_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """A row a record of a step of training."""
    rows = []
    for what, record in grouped(records):
        details = record.details or {}
        whole = sum(details.get(name, 0.0) for name in PARTS)
        shares = [_share(details, name, whole) for name in (*PARTS, "hidden")]
        if "hidden_share" in details:
            shares[-1] = f"{details['hidden_share']:.0%} of communication"
        overhead = f"{details['overhead']:+.1%}" if "overhead" in details else ""
        end = (f"{details.get('samples_per_second', 0):,.1f}", f"{details.get('loss', 0):.6f}")
        rows.append((what, record.peer, time_text(record.seconds), overhead, *shares, *end))
    return rows


def _share(details: Mapping[str, float], name: str, whole: float) -> str:
    if details.get(name):
        return f"{time_text(details[name])} ({details[name] / whole:.1%})"
    return "0" if name in details else ""


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
    at = 0.0
    for heading, record in grouped(records):
        at += 1.8 if heading else 1.0  # a heading has its place
        axes.text(0, at - 0.62, heading, fontsize=9, fontweight="bold", va="center")
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
