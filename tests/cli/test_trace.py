"""``tensorwire trace``: a table of the parts, of one file or of several, and its mistakes."""

from __future__ import annotations

import importlib
import os
import sys
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from tensorwire.cli import main
from tensorwire.observe.spans import Clock, Span
from tensorwire.trace.chrome import write_chrome
from tensorwire.trace.parts import ProcessTrace
from tests.trace.traces import job, record

trace = importlib.import_module("tensorwire.cli.trace")  # the package has a command of that name


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[str, str]:
    """What it prints on both streams; the exit status is 0, or 2 with one line."""
    monkeypatch.setattr(sys, "argv", ["tensorwire", "trace", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    assert ended.value.code == (2 if captured.err else 0)
    assert captured.err.count("\n") <= 1
    return captured.out, captured.err


def test_a_table_of_the_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_chrome(tmp_path / "t.json", job())
    out, _ = call(capsys, monkeypatch, tmp_path / "t.json")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["typical", "of", "steps", "step", "compute", "update", "exposed", "idle", "hidden"]
    # Ten seconds: four of computing, one and a half of updates, one of idling, and what is left.
    times = ["10,000.00", "ms", "4,000.00", "ms", "40%", "1,500.00", "ms", "15%", "3,500.00", "ms", "35%"]
    assert rows[1] == ["worker", "0", "3", *times, "1,000.00", "ms", "10%", "2,000.00", "ms", "20%"]
    assert rows[3][:2] == ["all", "6"]
    assert len(rows) == 4


@pytest.mark.parametrize(("names", "told"), [(["a"], "a"), (["a", "b"], "a, b"), (list("abcde"), "a, b, c and 2 more")])
def test_a_pictures_title_names_the_files_and_their_date(tmp_path: Path, names: list[str], told: str) -> None:
    files = [tmp_path / name for name in names]
    for number, file in enumerate(files):
        file.touch()
        moment = datetime(2026, 3, 4, 5, 6 + number).timestamp()
        os.utime(file, (moment, moment))
    assert trace._recorded([str(file) for file in files]) == f"{told} · 2026-03-04 05:{5 + len(names):02}"


def test_a_picture_of_a_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    write_chrome(tmp_path / "run.json", job())
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        call(capsys, monkeypatch, tmp_path / "run.json", "--plot", tmp_path / "run.svg")
    assert "run.json · 20" in (tmp_path / "run.svg").read_text()


def test_files_of_several_machines_are_one_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each launcher wrote its own; that of the second machine was 500 seconds ahead."""
    whole = job()
    away = ProcessTrace(
        "worker-1",
        {},
        {},
        [s._replace(start=s.start + 500, stop=s.stop + 500) for s in whole["worker-1"].spans],
        Clock(-500.0, 0.0002),
    )
    write_chrome(tmp_path / "all", whole)
    write_chrome(tmp_path / "0", {name: whole[name] for name in ("worker-0", "server-0")})
    write_chrome(tmp_path / "1", {"worker-1": away})
    expected, _ = call(capsys, monkeypatch, tmp_path / "all")
    out, _ = call(capsys, monkeypatch, tmp_path / "0", tmp_path / "1")
    assert out == expected + "the clocks of the machines agree to 0.200 ms\n"


def test_a_folder_of_traces_will_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, one in job().items():
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(one))
    assert "worker 1" in call(capsys, monkeypatch, tmp_path)[0]


def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_chrome(tmp_path / "t.json", job())
    write_chrome(tmp_path / "empty.json", {"worker-0": record("worker-0", [Span("push", 2, 0.0, 1.0)])})
    good = tmp_path / "t.json"
    for arguments, why in (
        ([good, good], "server 0 is in another file, too"),
        ([tmp_path / "none"], "cannot read"),
        ([tmp_path / "empty.json"], "no worker has a whole step in it"),
        ([good, "--plot", tmp_path / "x.gif"], "the name of a picture must end with .png"),
        ([], "Missing argument 'FILE...'"),
    ):
        assert why in call(capsys, monkeypatch, *arguments)[1]
