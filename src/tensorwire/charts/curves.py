"""A picture of trainings beside each other: the loss against samples, and against seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorwire.charts.figure import check_picture, save_picture

# Of Okabe and Ito; lines of the same colour family differ in their dashes.
_STYLES = (
    ("#000000", "-"),
    ("#D55E00", "-"),
    ("#E69F00", "--"),
    ("#CC79A7", "-"),
    ("#009E73", "-"),
    ("#0072B2", "-"),
    ("#0072B2", "--"),
    ("#56B4E9", ":"),
)
Curve = Sequence[tuple[float, float, float]]


def plot_curves(path: str | Path, curves: Mapping[str, Mapping[str, Curve]], *, option: str = "--report") -> None:
    """Draws the picture: a row per set of data, a line per training.

    Args:
        path: The picture; its suffix says its format.
        curves: By data and training, points of samples, seconds and loss.
        option: What people gave the path to, for the message.

    Raises:
        ArgumentError: It cannot be written.
        MissingPackage: matplotlib is not installed.
    """
    check_picture(path, option=option)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.7 + 3.2 * len(curves)), layout="constrained")
    rows = figure.subplots(len(curves), 2, squeeze=False, sharey="row")
    for (data, trainings), row in zip(curves.items(), rows, strict=True):
        for column, what in enumerate(("samples", "seconds")):
            axes = row[column]
            for (name, curve), (colour, dashes) in zip(trainings.items(), _STYLES, strict=False):
                xs, ys = [point[column] for point in curve], [point[2] for point in curve]
                axes.plot(xs, ys, color=colour, linestyle=dashes, linewidth=1.4, label=name)
            axes.set_yscale("log")
            axes.set_xlim(left=0)
            axes.set_xlabel(what)
            axes.grid(color="#DDDDDD", linewidth=0.5)
        row[0].set_ylabel("loss")
        row[0].set_title(data, loc="left", fontsize=10)
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    save_picture(figure, path, option=option)
