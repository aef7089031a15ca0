"""What ``train`` and ``graph`` tell besides their figures: where a step's time went, how big tensors are, a chart."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tensorwire.bench.models import MODELS, Model
from tensorwire.bench.records import Record, time_text
from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.extras import how_to_install
from tensorwire.observe.files import check_file, save_file
from tensorwire.sizes import size_text

MIB = 2**20
FORMATS = (".png", ".svg", ".pdf")
# Hatches tell the parts apart where colours do not; of these, each is lighter than the one before, for grey print.
PARTS = {
    "compute": ("#1F4E79", ""),
    "update": ("#CC79A7", "\\\\\\"),
    "exposed": ("#F0C040", "///"),
    "idle": ("#F0F0F0", "..."),
}
_HIDDEN = ("#999999", "xxx")


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; without frames where there is no terminal."""
    console = Console()
    if console.is_terminal:
        table = Table(*head, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    print(f"\n{title}")
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


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


def check_chart(path: str) -> None:
    """Raises `ArgumentError` or `Unsupported` now for a chart that could not be drawn after minutes."""
    if Path(path).suffix not in FORMATS:
        raise ArgumentError(f"--report {path}: the name must end in one of {', '.join(FORMATS)}")
    check_file(path, option="--report")
    _matplotlib()


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Unsupported(f"--report draws with matplotlib: {how_to_install('plot')}") from None
    return Figure


def chart(records: Sequence[Record], path: str, machine: Sequence[str]) -> None:
    """One bar a record: the parts of its step on top of each other, hidden communication beside.

    Ways that keep no trace are drawn reserve: their step is known, not its parts. Raises `ArgumentError` for a file
    that cannot be written.
    """
    figure = _matplotlib()(figsize=(10, 1.6 + 0.42 * len(records) + 0.3 * len(machine)), layout="constrained")
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
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(path).suffix.removeprefix("."), dpi=150)
    save_file(path, picture.getvalue(), option="--report")


def _bar(axes: Any, at: float, record: Record) -> None:
    details = record.details or {}
    end = 0.0
    if "compute" not in details:
        axes.barh(at, record.seconds * 1e3, height=0.6, facecolor="white", edgecolor="black", linewidth=0.8)
        end = record.seconds * 1e3
    for name, (colour, hatch) in PARTS.items() if "compute" in details else ():
        width = details[name] * 1e3
        if not width:
            continue
        style = {"facecolor": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}
        axes.barh(at, width, left=end, height=0.6, **style)
        end += width
    if details.get("hidden"):
        colour, hatch = _HIDDEN
        style = {"facecolor": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}
        axes.barh(at + 0.4, details["hidden"] * 1e3, height=0.2, **style)
    axes.text(end, at, f" {time_text(record.seconds)}", va="center", fontsize=8)


def _legend(figure: Any, records: Sequence[Record]) -> None:
    """What of it there is in the bars."""
    from matplotlib.patches import Patch

    details = [record.details or {} for record in records]
    names = {"exposed": "exposed communication", "hidden": "hidden communication (beside)"}
    styles = {**PARTS, "hidden": _HIDDEN}
    named = [(names.get(part, part), *style) for part, style in styles.items() if any(one.get(part) for one in details)]
    named += [("not divided", "white", "")] if any("compute" not in one for one in details) else []
    patches = [Patch(facecolor=c, hatch=h, edgecolor="black", linewidth=0.5, label=n) for n, c, h in named]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), fontsize=8, frameon=False)
