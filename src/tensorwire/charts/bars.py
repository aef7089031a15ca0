"""A picture of figures in groups: a panel per subject, a group of bars per case, a bar per series."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorwire.charts.figure import OUTLINE, check_picture, save_picture

# Of Okabe and Ito, from dark to light; hatches tell them apart in a grey print.
_STYLES = (("#0072B2", ""), ("#56B4E9", "////"), ("#E69F00", "xxxx"), ("#F2F2F2", "...."))
_WIDTH = 0.8  # of a group


def plot_bars(
    path: str | Path,
    panels: Mapping[str, Mapping[str, Mapping[str, float]]],
    *,
    cases: str,
    unit: str,
    caption: str = "",
    option: str = "--report",
) -> None:
    """Draws the picture.

    Args:
        path: The picture; its suffix says its format.
        panels: Figures by panel, series and case.
        cases: What the cases are, below the panels.
        unit: What the figures are, beside them.
        caption: Stands below everything.
        option: What people gave the path to, for the message.

    Raises:
        ArgumentError: It cannot be written.
        MissingPackage: matplotlib is not installed.
    """
    check_picture(path, option=option)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 5.0 * len(panels)), 4.2), layout="constrained")
    drawn: dict[str, Any] = {}
    for axes, (title, series) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        names = sorted({case for figures in series.values() for case in figures})
        width = _WIDTH / len(series)
        for number, (who, figures) in enumerate(series.items()):
            colour, hatch = _STYLES[number % len(_STYLES)]
            places = [names.index(case) + (number - (len(series) - 1) / 2) * width for case in figures]
            bars = axes.bar(places, list(figures.values()), width, facecolor=colour, hatch=hatch, **OUTLINE)
            axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=1)
            drawn.setdefault(who, bars)
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel(cases)
        axes.set_ylabel(unit)
        axes.set_title(title, loc="left", fontsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.legend(
        handles=list(drawn.values()),
        labels=list(drawn),
        loc="outside upper center",
        ncols=len(drawn),
        frameon=False,
        fontsize=8,
    )
    if caption:
        figure.supxlabel(caption, fontsize=6)
    save_picture(figure, path, option=option)
