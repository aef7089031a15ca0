"""Where a tensor that crosses is born."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tensorwire.graph import Edge, Unknown, analyze
from tests.graph.sketch import Sketch


def edge(s: Sketch, name: str) -> Edge:
    """The edge of that value."""
    return next(edge for edge in analyze(s.graph()).plan.edges if edge.name == name)


def born(s: Sketch, name: str) -> tuple[str, int, int]:
    found = edge(s, name)
    assert (found.copied == "") == (found.birthplace != "")
    return found.birthplace, found.index, found.offset


def test_through_a_chain_of_views() -> None:
    s = Sketch()
    s.op("x", on="a", shape=(8, 32))
    s.view("reshaped", "x", shape=(32, 8))
    s.view("transposed", "reshaped", shape=(8, 32))
    s.view("row", "transposed", shape=(32,), offset=96)
    s.op("y", "row", on="b")
    assert born(s, "row") == ("x", 0, 4 * 96)


def test_through_a_chain_in_place() -> None:
    s = Sketch()
    s.op("x", on="a")
    s.view("flat", "x")
    s.write("added", "flat")
    s.write("relu", "added")
    s.op("y", "relu", on="b")
    assert born(s, "relu") == ("x", 0, 0)


def test_items_are_born_as_outputs_of_their_operator() -> None:
    s = Sketch()
    s.several("norm", on="a")
    s.item("mean", "norm", 1)
    s.view("wide", "mean", shape=(8, 8))
    s.op("y", "wide", on="b")
    assert born(s, "mean") == ("norm", 1, 0)


def test_two_views_of_one_birth_share_its_memory() -> None:
    s = Sketch("abc")
    s.op("x", on="a", shape=(256,))
    s.view("left", "x", shape=(64,))
    s.view("right", "x", shape=(64,), offset=192)
    s.op("y", "left", on="b")
    s.op("z", "right", on="c")
    left, right = edge(s, "left"), edge(s, "right")
    assert (left.slot, left.offset, right.slot, right.offset) == (0, 0, 0, 768)


def test_what_is_copied_has_memory_of_its_own() -> None:
    s = Sketch("abc")
    s.op("x", on="a", shape=(256,))
    s.view("first", "x", shape=(4,))
    s.view("last", "x", shape=(4,), offset=252)
    s.op("all", "x", on="c")
    s.op("y", "first", "last", on="b")
    assert edge(s, "first").copied == edge(s, "last").copied == "it is small"
    spans = [(edge(s, name).slot or 0, size) for name, size in (("x", 1024), ("first", 64), ("last", 64))]
    spans.sort()
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))


def test_before_and_after_a_change_in_place_are_two_tensors() -> None:
    s = Sketch()
    s.op("x", on="a")
    s.op("early", "x", on="b")
    s.write("relu", "x")
    s.op("y", "relu", "early", on="b")
    before, after = edge(s, "x"), edge(s, "relu")
    assert (before.copied, after.birthplace) == ("it is changed in place after it was sent", "x")
    assert before.slot != after.slot


def test_sent_and_returned() -> None:
    s = Sketch()
    s.op("x", on="a")
    s.op("y", "x", on="b")
    s.op("z", "y", on="a")
    assert (born(s, "x"), born(s, "y")) == (("x", 0, 0), ("y", 0, 0))


def varying(s: Sketch) -> None:
    s.op("base", on="a", shape=(Unknown("s", 99),))
    s.view("x", "base", shape=(32,))


def unsized(s: Sketch) -> None:
    s.op("x", on="a", shape=(Unknown("s", 99),), sized=False)


def beyond(s: Sketch) -> None:
    s.op("base", on="a", shape=(64,))
    s.view("x", "base", shape=(20,), offset=50)


def given_out(s: Sketch) -> None:
    s.op("x", on="a")
    s.view("shown", "x")
    s.out("shown", caller=True)


def not_allocated(s: Sketch) -> None:
    s.op("x", on="a", fresh=False)


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (lambda s: s.input("x", on="a"), "an input of the caller"),
        (lambda s: s.saved("x", on="a"), "kept from the forward graph"),
        (lambda s: s.op("x", on="a", shape=None), "it is small"),
        (lambda s: s.op("x", on="a", shape=(16,)), "it is small"),
        (varying, "a part of what varies"),
        (unsized, "its size is not known in advance"),
        (beyond, "it shows more than base, whose memory it is"),
        (given_out, "the caller gets it"),
        (not_allocated, "op does not allocate it"),
    ],
)
def test_why_it_is_copied(write: Callable[[Sketch], object], why: str) -> None:
    s = Sketch()
    write(s)
    s.op("y", "x", on="b")
    found = analyze(s.graph()).plan.edges[-1]
    assert (found.birthplace, found.copied) == ("", why)


def test_a_parameter_is_lent() -> None:
    s = Sketch()
    s.parameter("x", on="a")
    s.op("y", "x", on="b")
    found = analyze(s.graph()).plan
    assert (found.edges[0].lent, found.edges[0].slot, found.edges[0].copied) == (True, None, "")
    assert found.loans == {("a", "b")}
    assert dict(found.outbox) == {"a": 0, "b": 0}


def test_a_parameter_that_the_graph_changes_is_copied() -> None:
    s = Sketch()
    s.parameter("x", on="a")
    s.op("y", "x", on="b")
    s.write("z", "x", on="a")
    found = analyze(s.graph()).plan.edges[0]
    assert (found.lent, found.copied) == (False, "a parameter")
