"""The picture of figures in groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorwire.charts.bars import plot_bars
from tensorwire.errors import ArgumentError

PANELS = {
    "one network": {"ours": {"1": 2.53, "2": 1.27}, "theirs": {"1": 3.79}},
    "another": {"theirs": {"2": 7.51}},
}


def test_every_figure_is_there_once(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib

    path = tmp_path / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot_bars(path, PANELS, cases="workers", unit="seconds", caption="a machine")
    text = path.read_text()
    for words in ("one network", "another", "ours", "theirs", "2.53", "1.27", "3.79", "7.51", "a machine"):
        assert text.count(f">{words}<") == 1, words
    assert text.count(">workers<") == text.count(">seconds<") == len(PANELS)


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"--report .*\.png"):
        plot_bars(tmp_path / "picture.txt", PANELS, cases="workers", unit="seconds")
    assert not list(tmp_path.iterdir())
