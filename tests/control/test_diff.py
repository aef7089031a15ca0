"""What people are shown of two plans that differ."""

from __future__ import annotations

from tensorwire.control.diff import differing_lines


def shown(a: str, b: str) -> list[str]:
    return differing_lines("worker 0", a, "worker 1", b).splitlines()


def test_lines_that_only_one_side_has() -> None:
    assert shown("a\nb\nc", "a\nd\nc\nc") == ["--- worker 0", "+++ worker 1", "-b", "+d", "+c"]


def test_one_line_on_each_side_is_one_line() -> None:
    assert shown("a\nmode Sync()", "a\nmode Async()") == ["worker 0 has mode Sync(), worker 1 mode Async()"]


def test_lines_in_another_order() -> None:
    assert shown("a\nb\nc", "a\nc\nb") == ["worker 0 has (line 2) b, worker 1 (line 2) c"]


def test_texts_that_read_the_same() -> None:
    assert shown("a", "a") == ["their descriptions read the same; the details differ"]


def test_many_and_long_lines_are_cut() -> None:
    lines = shown("\n".join(f"{i} {'x' * 1000}" for i in range(100)), "")
    assert len(lines) == 2 + 10 + 1
    assert max(map(len, lines)) < 250
    assert lines[-1] == "-... and 90 lines more"
