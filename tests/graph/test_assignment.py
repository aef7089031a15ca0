"""Every node is assigned to a worker."""

from __future__ import annotations

from tensorwire.graph.passes.assignment import assign
from tests.graph.sketch import Sketch


def test_where_the_user_put_it() -> None:
    s = Sketch()
    s.op("x", on="a")
    s.op("y", "x", on="b")
    assert assign(s.graph()) == {"x": "a", "y": "b"}


def test_else_where_its_last_operand_is() -> None:
    s = Sketch()
    s.op("x", on="a")
    s.op("y", on="b")
    s.op("z", "x", "y")
    assert assign(s.graph())["z"] == "b"


def test_else_where_a_parameter_lies_that_it_uses() -> None:
    s = Sketch()
    s.input("x")
    s.parameter("w", on="b")
    s.op("y", "x", "w")
    assert assign(s.graph())["y"] == "b"


def test_else_where_its_first_user_is_and_that_goes_on_backwards() -> None:
    s = Sketch()
    s.input("x")
    s.op("first", "x")
    s.op("second", "first")
    s.op("third", "second", on="b")
    s.op("last", "second", on="a")
    found = assign(s.graph())
    assert (found["first"], found["second"]) == ("b", "b")


def test_else_the_default() -> None:
    s = Sketch()
    s.op("x")
    assert assign(s.graph(), "b") == {"x": "b"}
    assert assign(s.graph()) == {"x": "a"}


def test_items_live_with_their_operator() -> None:
    s = Sketch()
    s.several("pair", on="b")
    s.item("left", "pair", worker="a")
    s.several("late")
    s.item("right", "late")
    s.op("user", "right", on="b")
    s.item("inner", "left")
    found = assign(s.graph())
    assert {found[name] for name in ("left", "late", "right", "inner")} == {"b"}


def test_an_item_of_what_is_given() -> None:
    s = Sketch()
    s.input("pair", shape=None)
    s.item("left", "pair")
    s.op("user", "left", on="b")
    assert assign(s.graph())["left"] == "b"


def test_a_write_runs_where_the_memory_is_despite_a_placement() -> None:
    s = Sketch()
    s.parameter("buffer", on="b")
    s.op("new", on="a")
    s.write("copy", "buffer", "new", on="a")
    s.view("part", "buffer", on="a")
    s.write("fill", "part", "new", on="a")
    s.op("made", on="b")
    s.write("relu", "made", on="a")
    found = assign(s.graph())
    assert (found["copy"], found["fill"], found["relu"]) == ("b", "b", "b")


def test_a_write_to_what_is_everywhere_runs_where_the_user_put_it() -> None:
    s = Sketch()
    s.input("cache")
    s.op("new", on="a")
    s.write("copy", "cache", "new", on="b")
    assert assign(s.graph())["copy"] == "b"


def test_a_write_to_what_has_no_home_yet_draws_it_there() -> None:
    s = Sketch()
    s.op("made")
    s.view("part", "made")
    s.write("fill", "part", on="b")
    assert set(assign(s.graph()).values()) == {"b"}
