"""Lanes, boxes and arrows: where they are drawn, and what is read."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from tensorwire.charts.lanes import Box, LaneMessage, Panel, _fitting, _Picture, plot_lanes
from tensorwire.errors import ArgumentError

KINDS = ("first kind", "second kind", "third kind", "fourth kind")


def message(row: int, source: str, targets: str, kind: int = 0, text: str = "x: 4 B") -> LaneMessage:
    return LaneMessage(row, source, tuple(targets), KINDS[kind], text)


def conversation(lanes: str = "abcd") -> Panel:
    """Down the lanes and back."""
    there = [*lanes, *lanes[-2::-1]]
    boxes = [Box(lane, row, ("net.0", "to net.7", "12 operators")) for row, lane in enumerate(there)]
    sent = [message(row, one, other) for row, (one, other) in enumerate(itertools.pairwise(there))]
    return Panel("two & a half", dict.fromkeys(lanes, "outbox 4 KiB"), boxes, sent)


def draw(path: Path, *panels: Panel) -> Any:
    """The text of the picture, and its numbers."""
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot_lanes(path, "$net <1>", panels, kinds=KINDS, option="--plot")
    return path.read_text()


def test_everything_is_read(tmp_path: Path) -> None:
    text = draw(tmp_path / "lanes.svg", conversation(), conversation())
    for words in (
        "$net &lt;1&gt;",
        "two &amp; a half",
        "a",
        "outbox 4 KiB",
        "net.0",
        "12 operators",
        "x: 4 B",
        KINDS[0],
    ):
        assert f">{words}<" in text, words
    assert KINDS[1] not in text  # the legend has what there is


def test_the_same_picture_has_the_same_bytes(tmp_path: Path) -> None:
    assert draw(tmp_path / "one.svg", conversation()) == draw(tmp_path / "other.svg", conversation())


def test_strokes_differ_without_colour(tmp_path: Path) -> None:
    sent = [message(0, "a", "b", kind) for kind in range(4)]
    text = draw(tmp_path / "lanes.svg", Panel("", dict.fromkeys("ab", ""), [Box("a", 0, ("net",))], sent))
    strokes = re.findall(
        r'style="fill: none; (?:stroke-dasharray: ([^;]*); )?[^"]*stroke: #(?:0072b2|009e73|d55e00|555555)', text
    )
    assert len(set(strokes)) == 4


@pytest.mark.parametrize("lanes", ["ab", "abcdefgh"])
def test_nothing_overlaps(lanes: str) -> None:
    picture = _Picture(conversation(lanes))
    spans = sorted((top, top + height) for _, top, height in picture._boxes)
    assert all(below[0] > above[1] for above, below in itertools.pairwise(spans))
    rows = sorted(y for _, y in picture._messages)
    assert all(not top < y < bottom for top, bottom in spans for y in rows)
    assert spans[0][0] > 0
    assert max(spans[-1][1], rows[-1]) < picture.height


def test_arrows_share_a_row_where_they_have_no_lane_in_common() -> None:
    sent = [message(0, "a", "b"), message(0, "d", "c"), message(0, "b", "c"), message(0, "a", "d")]
    picture = _Picture(Panel("", dict.fromkeys("abcd", ""), [], sent))
    heights = [y for _, y in picture._messages]
    assert heights[0] == heights[1] < heights[2] < heights[3]


def test_of_a_long_path_the_end_is_shown() -> None:
    assert _fitting("model.layers.17.attention", 10.0) == "model.layers.17.attention"
    shown = _fitting("model.layers.17.attention", 1.0)
    assert shown.startswith("…")
    assert "model.layers.17.attention".endswith(shown[1:])


@pytest.mark.long
def test_a_long_picture_is_drawn_with_fewer_points(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panel = conversation("ab")
    rows = 600
    boxes = [Box("ab"[row % 2], row, ("net", "1 operator")) for row in range(rows)]
    path = tmp_path / "long.png"
    plot_lanes(path, "", [Panel("", panel.lanes, boxes, [])], kinds=KINDS, option="--plot")
    width, height = (int.from_bytes(path.read_bytes()[at : at + 4], "big") for at in (16, 20))
    assert width < height <= 60000


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(
        ArgumentError, match=r"--svg .*lanes.gif: the name of a picture must end with \.png, \.svg, \.pdf"
    ):
        plot_lanes(tmp_path / "lanes.gif", "", [conversation()], kinds=KINDS, option="--svg")
