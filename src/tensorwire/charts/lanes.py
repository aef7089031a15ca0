"""Pictures of what each process does and sends: one lane per process, time downwards, like a sequence diagram.

Simultaneous activities share one row of boxes. Transfers after it have rows of their own below, so that no arrow
crosses a box or another arrow's words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorwire.charts.figure import DPI, check_picture, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# All lengths are inches, of the figure as of the axes.
_MARGIN, _WIDTH, _LANE = 0.2, 7.0, 1.9  # around all; at least, of all and of a lane
_LINE, _MESSAGE, _GAP = 0.15, 0.3, 0.12  # heights: of a line of text, of a row of arrows, below a row of boxes
_HEADER, _TITLE = 0.55, 0.4
_LETTER = 0.067  # mean width, in the font of 8 points
_MOST_PIXELS = 60000  # in one direction, that matplotlib draws
# Colours of Okabe and Ito, which people with any colour vision tell apart. Strokes differ in grey, too.
_STROKES: Sequence[Mapping[str, Any]] = (
    {"color": "#0072B2", "linewidth": 1.6},
    {"color": "#009E73", "linewidth": 1.6, "linestyle": (0, (8, 2, 1.5, 2))},
    {"color": "#D55E00", "linewidth": 1.4, "linestyle": (0, (4, 2))},
    {"color": "#555555", "linewidth": 1.0, "linestyle": (0, (1, 1.5))},
)


@dataclass(frozen=True)
class Box:
    """What ``lane`` does in ``row``: lines of text."""

    lane: str
    row: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class LaneMessage:
    """What ``source`` sends to ``targets`` after ``row``. ``kind``: one of the picture's kinds."""

    row: int
    source: str
    targets: tuple[str, ...]
    kind: str
    text: str


@dataclass(frozen=True)
class Panel:
    """One diagram. ``lanes``: each one's name, and a note below it."""

    title: str
    lanes: Mapping[str, str]
    boxes: Sequence[Box]
    messages: Sequence[LaneMessage]


def plot_lanes(path: str | Path, title: str, panels: Sequence[Panel], *, kinds: Sequence[str], option: str) -> None:
    """Draws panels, one below the other.

    Args:
        path: The picture; its suffix says its format.
        title: Stands above all.
        panels: What is drawn. All have the same lanes.
        kinds: The kinds of messages, up to four. Each has a stroke of its own; those that occur are in the legend.
        option: What people gave the path to, for messages.

    Raises:
        ArgumentError: It cannot be drawn there.
        MissingPackage: matplotlib is not installed.
    """
    check_picture(path, option=option)
    from matplotlib.figure import Figure

    pictures = [_Picture(panel) for panel in panels]
    width = max(picture.width for picture in pictures)
    height = 0.85 + sum(picture.height for picture in pictures)
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    _text(axes, _MARGIN, 0.25, title, size=13, weight="bold")
    strokes = dict(zip(kinds, _STROKES, strict=False))
    there = {message.kind for panel in panels for message in panel.messages}
    _legend(axes, {kind: stroke for kind, stroke in strokes.items() if kind in there})
    top = 0.7
    for picture in pictures:
        picture.draw(axes, top, strokes)
        top += picture.height
    most = min(_MOST_PIXELS / max(width, height), (1e8 / (width * height)) ** 0.5)
    save_picture(figure, path, option=option, dpi=min(DPI, most))


def _legend(axes: Axes, strokes: Mapping[str, Mapping[str, Any]]) -> None:
    x = _MARGIN
    for kind, stroke in strokes.items():
        axes.plot([x, x + 0.35], [0.55, 0.55], **stroke)
        _head(axes, x + 0.4, 0.55, 1, stroke)
        _text(axes, x + 0.48, 0.55, kind, size=8)
        x += 0.73 + _LETTER * len(kind)


class _Picture:
    """A panel, laid out: where its rows are."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.lane = max(_LANE, (_WIDTH - 2 * _MARGIN) / len(panel.lanes))
        self.width = 2 * _MARGIN + self.lane * len(panel.lanes)
        self._at = {name: _MARGIN + self.lane * (number + 0.5) for number, name in enumerate(panel.lanes)}
        self._number = {name: number for number, name in enumerate(panel.lanes)}
        self._boxes: list[tuple[Box, float, float]] = []  # with top and height, below the panel's
        self._messages: list[tuple[LaneMessage, float]] = []
        y = _TITLE + _HEADER
        for row in sorted({box.row for box in panel.boxes} | {message.row for message in panel.messages}):
            y = self._place_row(row, y)
        self.height = y + 0.2

    def _place_row(self, row: int, y: float) -> float:
        boxes = [box for box in self.panel.boxes if box.row == row]
        height = 0.12 + _LINE * max((len(box.lines) for box in boxes), default=0)
        for box in boxes:
            own = 0.12 + _LINE * len(box.lines)
            self._boxes.append((box, y + (height - own) / 2, own))
        y += height
        rows = self._packed(message for message in self.panel.messages if message.row == row)
        for messages in rows:
            y += _MESSAGE
            self._messages += [(message, y) for message in messages]
        return y + _GAP + (0.1 if rows else 0.0)

    def _packed(self, messages: Iterable[LaneMessage]) -> list[list[LaneMessage]]:
        """In rows: side by side where they have no lane in common."""
        rows: list[tuple[set[int], list[LaneMessage]]] = []
        for message in messages:
            ends = [self._number[name] for name in (message.source, *message.targets)]
            lanes = set(range(min(ends), max(ends) + 1))
            for taken, row in rows:
                if not taken & lanes:
                    taken |= lanes
                    row.append(message)
                    break
            else:
                rows.append((lanes, [message]))
        return [row for _, row in rows]

    def draw(self, axes: Axes, top: float, strokes: Mapping[str, Mapping[str, Any]]) -> None:
        _text(axes, _MARGIN, top + 0.22, self.panel.title, size=10.5)
        for name, note in self.panel.lanes.items():
            self._draw_lane(axes, name, note, top + _TITLE - 0.05, top + self.height - 0.15)
        for box, y, height in self._boxes:
            self._draw_box(axes, box, top + y, height)
        for message, y in self._messages:
            self._draw_message(axes, message, top + y, strokes[message.kind])

    def _draw_lane(self, axes: Axes, name: str, note: str, top: float, bottom: float) -> None:
        from matplotlib.patches import Rectangle

        x, width = self._at[name], self.lane - 0.1
        axes.add_patch(Rectangle((x - width / 2, top), width, bottom - top, facecolor="#F3F4F6", edgecolor="none"))
        axes.plot([x, x], [top + 0.45, bottom - 0.05], color="#C4C9CF", linewidth=1.0, zorder=1)
        _text(axes, x, top + 0.15, name, size=9, weight="bold", ha="center")
        _text(axes, x, top + 0.32, note, size=7.5, ha="center", color="#555555")

    def _draw_box(self, axes: Axes, box: Box, top: float, height: float) -> None:
        from matplotlib.patches import Rectangle

        x, width = self._at[box.lane], min(self.lane - 0.25, 2.6)
        style: dict[str, Any] = {"facecolor": "white", "edgecolor": "#333333", "linewidth": 0.8, "zorder": 3}
        axes.add_patch(Rectangle((x - width / 2, top), width, height, **style))
        for number, line in enumerate(box.lines):
            y = top + 0.06 + _LINE * (number + 0.5)
            _text(axes, x, y, _fitting(line, width - 0.1), size=8, ha="center", zorder=4)

    def _draw_message(self, axes: Axes, message: LaneMessage, y: float, stroke: Mapping[str, Any]) -> None:
        start, ends = self._at[message.source], [self._at[name] for name in message.targets]
        left, right = min(start, *ends), max(start, *ends)
        axes.plot([left + 0.05 * (left < start), right - 0.05 * (right > start)], [y, y], **stroke, zorder=2)
        axes.plot([start], [y], marker="o", markersize=3.5, color=stroke["color"], zorder=3)
        for end in ends:
            _head(axes, end, y, 1 if end > start else -1, stroke)
        side = 1 if ends[0] > start else -1
        words = _fitting(message.text, self.lane - 0.1)
        _text(axes, start + side * self.lane / 2, y - 0.1, words, size=7.5, ha="center", zorder=4)


def _fitting(words: str, width: float) -> str:
    """What there is room for: of a path, its end."""
    most = int(width / _LETTER)
    return words if len(words) <= most else f"…{words[1 - most :]}"


def _head(axes: Axes, x: float, y: float, side: int, stroke: Mapping[str, Any]) -> None:
    """An arrow's, with its tip at ``x``."""
    axes.plot([x - side * 0.05], [y], marker=">" if side > 0 else "<", markersize=6.5, color=stroke["color"], zorder=3)


def _text(axes: Axes, x: float, y: float, words: str, *, size: float, zorder: float = 2, **more: Any) -> None:
    # Dollars would be formulas.
    axes.text(x, y, words, fontsize=size, va="center", parse_math=False, zorder=zorder, **more)
