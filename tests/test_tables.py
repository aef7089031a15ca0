"""Tables, in a file and on a terminal."""

from __future__ import annotations

import pytest
from rich.text import Text

from tensorwire.tables import print_table

ROWS = [("worker 0", "1,024", "a [b] c"), None, ("w", Text("7", style="bold"), "d")]


def test_a_file_gets_plain_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("who", "steps", ""), ROWS, left=(0, 2), title="Title", caption="below")
    assert capsys.readouterr().out.splitlines() == [
        "Title",
        "who       steps",
        "worker 0  1,024  a [b] c",
        "w             7  d",
        "below",
    ]


def test_a_table_without_names_of_columns_has_no_head(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("", ""), [("data", "digits"), ("  step", "1 ms")], left=(0, 1))
    assert capsys.readouterr().out == "data    digits\n  step  1 ms\n"


def test_a_file_has_room_for_long_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a", "b"), [("x" * 300, "1")])
    assert "x" * 300 + "  1\n" in capsys.readouterr().out


def test_a_terminal_gets_a_frame(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    print_table(("who", "steps", ""), ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "──" in line]
    assert any("worker 0" in line and "1,024" in line for line in lines)
