"""The picture of a step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tensorwire.charts.figure import FORMATS, PART_STYLES
from tensorwire.charts.steps import median_step, plot_steps
from tensorwire.errors import ArgumentError, MissingPackage
from tensorwire.trace.parts import PARTS, steps_of_trace
from tests.trace.traces import job, record

MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_picture_is_drawn_in_every_format(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture.{kind}"
    plot_steps(path, job())
    assert path.read_bytes().startswith(MAGIC[kind])


def test_the_picture_shows_every_process_and_part(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib

    path = tmp_path / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot_steps(path, job(), of="run_$1_$2.json · today")
    text = path.read_text()
    assert "run_$1_$2.json · today · 2 workers, 1 server<" in text
    for words in ("worker 0", "worker 1", "server 0", "compute", "update", "exposed", "idle", "hidden", "round"):
        assert words in text


def test_parts_differ_without_colour() -> None:
    assert tuple(PART_STYLES) == PARTS
    assert len({style.get("hatch") for style in PART_STYLES.values()}) == len(PARTS)


def test_the_step_that_is_drawn_is_of_median_length() -> None:
    steps = [*steps_of_trace(job(8))]
    assert median_step(steps) in range(2 + 3, 2 + 8)
    assert median_step(steps[:1]) == 2


def test_what_cannot_be_drawn_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for path, why in (("picture.gif", r"end with \.png, \.svg, \.pdf"), ("no/such/place.png", "there is no folder")):
        with pytest.raises(ArgumentError, match=why):
            plot_steps(tmp_path / path, job())
    with pytest.raises(ArgumentError, match="no whole step"):
        plot_steps(tmp_path / "empty.png", {"worker-0": record("worker-0", [])})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackage, match=r"pip install '\.\[plot\]'"):
        plot_steps(tmp_path / "picture.png", job())
    assert list(tmp_path.iterdir()) == []
