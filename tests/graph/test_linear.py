"""The passes' work grows like the graph: counted in lines of their code that run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tensorwire.graph
from tensorwire.graph import analyze
from tests.graph.sketch import Sketch

FOLDER = str(Path(tensorwire.graph.__file__).parent)


def to_and_fro(s: Sketch, length: int) -> None:
    for i in range(length):
        s.op(f"n{i}", *([f"n{i - 1}"] if i else []), on="abcd"[i % 4])


def all_alive(s: Sketch, length: int) -> None:
    for i in range(length // 2):
        s.op(f"x{i}", on="a", shape=(64 + i % 97,))
    for i in range(length // 2):
        s.op(f"y{i}", f"x{i}", on="b")
        s.out(f"y{i}", "a")


def of_many_lives(s: Sketch, length: int) -> None:
    """Tensors of many sizes, of which the late die early: many holes."""
    for i in range(length // 2):
        s.op(f"x{i}", *([f"y{i - 1}"] if i else []), on="a", shape=(64 + 31 * i % 997,))
        s.op(f"y{i}", f"x{i}", on="b", shape=(64 + 17 * i % 991,))
        if i % 3:
            s.out(f"x{i}")


def narrow_views(s: Sketch, length: int) -> None:
    s.op("x", on="a", shape=(256 * length,))
    for i in range(length // 2):
        s.view(f"v{i}", "x", on="a", offset=64 * i)
        s.op(f"y{i}", f"v{i}", on="b")


def chain_of_views(s: Sketch, length: int) -> None:
    s.op("x", on="a", shape=(4 * length,))
    for i in range(length // 2):
        s.view(f"v{i}", f"v{i - 1}" if i else "x", on="a", shape=(4 * length - i,))
        s.op(f"y{i}", f"v{i}", on="b")


def changes(s: Sketch, length: int) -> None:
    s.input("state")
    last = "state"
    for i in range(length // 2):
        s.op(f"x{i}", last, on="ab"[i % 2], cheap=True)
        last = s.write(f"w{i}", last, f"x{i}", on="ba"[i % 2])


def many_inputs(s: Sketch, length: int) -> None:
    for i in range(length // 2):
        s.input(f"p{i}")
        s.out(f"p{i}")
    for i in range(length // 2):
        s.op(f"x{i}", f"p{i}", on="ab"[i % 2], cheap=True)


def lines(write: Callable[[Sketch, int], None], length: int) -> int:
    """How many run for a graph of that length."""
    sketch = Sketch("abcd")
    write(sketch, length)
    graph = sketch.graph()
    count = 0

    def local(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    def trace(frame: Any, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(FOLDER) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert analyze(graph).plan.text
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "write", [to_and_fro, all_alive, of_many_lives, narrow_views, chain_of_views, changes, many_inputs]
)
def test_ten_times_the_graph_is_ten_times_the_work(write: Callable[[Sketch, int], None]) -> None:
    assert lines(write, 2000) <= 11 * lines(write, 200)
