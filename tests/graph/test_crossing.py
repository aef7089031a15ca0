"""Which values cross to which workers."""

from __future__ import annotations

import pytest

from tensorwire.errors import ArgumentError
from tensorwire.graph import Output, analyze
from tensorwire.graph.kinds import BOUNDED, SMALL
from tensorwire.graph.passes.assignment import assign
from tensorwire.graph.passes.crossing import Crossings, crossings
from tests.graph.sketch import Sketch


def cross(s: Sketch) -> Crossings:
    graph = s.graph()
    return crossings(graph, assign(graph))


def workers(names: str) -> frozenset[str]:
    return frozenset(names)


def test_what_stays_does_not_cross() -> None:
    s = Sketch()
    s.input("x")
    s.op("y", "x", on="a")
    s.op("z", "x", on="b")
    s.op("z2", "z", on="b")
    found = cross(s)
    assert found.sent == {}
    assert (found.runs["y"], found.holds["z2"]) == (workers("a"), workers("b"))


def test_a_tensor_crosses_to_a_worker_once() -> None:
    s = Sketch("abc")
    s.op("x", on="a")
    s.op("y", "x", on="b")
    s.op("z", "x", "y", on="b")
    s.op("u", "x", on="c")
    s.op("v", "x", on="c")
    found = cross(s)
    assert found.sent == {"x": ("a", ("b", "c"))}
    assert found.holds["x"] == workers("abc")


def test_an_output_crosses_to_who_wants_it() -> None:
    s = Sketch("abc")
    s.op("x", on="a")
    s.op("y", "x", on="b")
    s.out("y", "ac")
    s.out("x")
    found = cross(s)
    assert found.sent == {"x": ("a", ("b",)), "y": ("b", ("a", "c"))}
    assert found.holds["y"] == workers("abc")


def test_what_forward_sent_is_there_for_backward() -> None:
    s = Sketch()
    s.saved("activation", on="ab")
    s.saved("other", on="a")
    s.op("here", "activation", on="a")
    s.op("there", "activation", "other", on="b")
    assert cross(s).sent == {"other": ("a", ("b",))}


# ---- computed twice rather than sent


def test_cheap_nodes_on_inputs_are_replicated() -> None:
    s = Sketch()
    s.input("text")
    s.op("mask", "text", on="a", cheap=True)
    s.op("wider", "mask", on="a", cheap=True)
    s.op("x", "wider", on="a")
    s.op("y", "wider", "x", on="b")
    found = cross(s)
    assert set(found.sent) == {"x"}
    assert found.runs["mask"] == found.runs["wider"] == workers("ab")


def test_a_cheap_node_that_nobody_wants_does_not_run() -> None:
    s = Sketch()
    s.input("text")
    s.op("mask", "text", cheap=True)
    assert cross(s).runs["mask"] == workers("")


@pytest.mark.parametrize("why", ["random", "dear", "of what one worker has", "of what was computed", "written"])
def test_others_are_sent(why: str) -> None:
    s = Sketch()
    base = s.parameter("w", on="a") if why == "of what one worker has" else s.input("text")
    if why == "of what was computed":
        base = s.op("h", base, on="a")
    s.op("mask", base, on="a", cheap=why != "dear", random=why == "random")
    last = s.write("drop", "mask", on="a") if why == "written" else "mask"
    s.op("x", last, on="a")
    s.op("y", last, on="b")
    found = cross(s)
    assert (set(found.sent), found.runs["mask"]) == ({last}, workers("a"))


def test_what_is_kept_is_kept_where_it_is_used_else_at_home() -> None:
    s = Sketch()
    s.input("text")
    s.op("used", "text", on="a", cheap=True)
    s.op("unused", "text", on="a", cheap=True)
    s.op("x", "used", on="b")
    s.out("used")
    s.out("unused")
    found = cross(s)
    assert (found.runs["used"], found.runs["unused"]) == (workers("b"), workers("a"))


# ---- views


def test_a_view_follows_its_base() -> None:
    s = Sketch()
    s.op("x", on="a")
    s.view("t", "x", on="a", shape=(64, 1))
    s.view("u", "t", on="a", shape=(8, 8))
    s.op("y", "t", "u", on="b")
    s.op("z", "x", on="b")
    found = cross(s)
    assert found.sent == {"x": ("a", ("b",))}
    assert found.runs["t"] == found.runs["u"] == workers("b")  # nobody needs it on a


@pytest.mark.parametrize("on", ["a", "b"])
def test_a_narrow_view_is_made_where_its_base_is_and_crosses_by_itself(on: str) -> None:
    s = Sketch()
    s.op("x", on="a")
    s.view("row", "x", on=on, shape=(31,))
    s.op("y", "row", on="b")
    assert cross(s).sent == {"row": ("a", ("b",))}


def test_several_narrow_views_to_one_worker_are_their_base() -> None:
    s = Sketch("abc")
    s.op("x", on="a")
    for i in range(3):
        s.view(f"v{i}", "x", on="a", shape=(16,), offset=16 * i)
    s.op("y", "v0", "v1", on="b")
    s.op("z", "v2", on="c")
    assert cross(s).sent == {"x": ("a", ("b",)), "v2": ("a", ("c",))}


def test_wide_steps_do_not_make_a_narrow_view_wide() -> None:
    s = Sketch()
    s.op("x", on="a", shape=(256,))
    s.view("half", "x", on="a", shape=(128,))
    s.view("quarter", "half", on="a", shape=(64,))
    s.op("y", "quarter", on="b")
    assert cross(s).sent == {"quarter": ("a", ("b",))}


def test_a_view_with_gaps_counts_as_long_as_it_spans() -> None:
    s = Sketch()
    s.op("x", on="a", shape=(8, 64))
    s.view("column", "x", on="a", shape=(8, 4), stride=(64, 1), offset=60)
    s.op("y", "column", on="b")
    assert cross(s).sent == {"x": ("a", ("b",))}


def test_a_shown_again_tensor_crosses_once() -> None:
    s = Sketch()
    s.op("x", on="a", shape=(64, 1))
    s.view("many", "x", on="a", shape=(64, 100), stride=(1, 0))
    s.op("y", "many", on="b")
    assert cross(s).sent == {"x": ("a", ("b",))}


# ---- tuples


def test_tuples_never_cross_but_their_items_do() -> None:
    s = Sketch()
    s.several("pair", on="a")
    s.item("left", "pair", 0)
    s.item("right", "pair", 1)
    s.op("y", "right", on="b")
    found = cross(s)
    assert found.sent == {"right": ("a", ("b",))}
    assert found.runs["pair"] == found.runs["left"] == workers("a")


def test_a_split_is_made_where_its_items_are_used() -> None:
    s = Sketch()
    s.op("x", on="a")
    s.several("split", "x", on="a", alias="x", fresh=False)
    for i in range(2):
        s.item(f"part{i}", "split", i, shape=(32,), alias="x")
    s.op("y", "part0", "part1", on="b")
    found = cross(s)
    assert found.sent == {"x": ("a", ("b",))}
    assert found.runs["split"] == found.runs["part0"] == workers("b")


def test_an_item_does_not_go_where_its_operator_does_not() -> None:
    s = Sketch()
    s.op("x", on="a")
    s.several("pair", "x", on="a")
    s.item("same", "pair", alias="x")  # as wide as x, whose memory it shows
    s.op("y", "same", on="b")
    assert cross(s).sent == {"same": ("a", ("b",))}


def test_items_of_a_replicated_operator_are_replicated() -> None:
    s = Sketch()
    s.input("x")
    s.several("pair", "x", on="a", cheap=True)
    s.item("left", "pair")
    s.op("y", "left", on="b")
    found = cross(s)
    assert (found.sent, found.runs["pair"]) == ({}, workers("b"))


# ---- written in place


def test_a_write_runs_even_if_nobody_wants_what_it_gives() -> None:
    s = Sketch()
    s.parameter("mean", on="b")
    s.op("new", on="a")
    s.write("copy", "mean", "new", on="a")
    found = cross(s)
    assert (found.runs["copy"], found.sent) == (workers("b"), {"new": ("a", ("b",))})


def test_what_all_workers_have_is_changed_on_all_that_read_it() -> None:
    s = Sketch("abc")
    s.input("state")
    s.view("part", "state", on="a")
    s.op("x", "part", on="a")
    s.op("y", "state", "x", on="b")
    s.write("copy", "state", "y", on="b")
    found = cross(s)
    assert found.runs["copy"] == workers("ab")
    assert found.sent == {"x": ("a", ("b",)), "y": ("b", ("a",))}


def test_what_another_worker_changed_cannot_be_read_by_its_old_name() -> None:
    s = Sketch()
    s.op("x", on="a")
    s.write("relu", "x", on="a")
    s.op("fine", "x", on="a")
    s.op("y", "x", on="b")
    with pytest.raises(ArgumentError, match=r"y runs on b and reads x after relu changed it in place on a: .* relu"):
        cross(s)


def test_a_worker_that_has_only_a_copy_of_it_cannot_change_it() -> None:
    s = Sketch()
    s.parameter("x", on="a")
    s.parameter("w", on="b")
    s.add("both", "write", "x", "w", writes=("w", "x"))
    with pytest.raises(ArgumentError, match="both runs on a and changes w in place, which is on b"):
        cross(s)


def test_what_some_workers_are_given_is_computed_on_each_of_them_and_sent_to_others() -> None:
    s = Sketch("abs")
    s.input("x", on="ab")
    s.op("scaled", "x", cheap=True)
    s.op("constant", on=None, cheap=True)
    for worker in "abs":
        s.op(f"used on {worker}", "scaled", "constant", on=worker)
    found = cross(s)
    assert (found.runs["scaled"], found.runs["constant"]) == (workers("ab"), workers("abs"))
    assert found.sent == {"scaled": ("a", ("s",))}


def test_what_some_workers_are_given_and_none_of_them_wants_is_computed_on_one() -> None:
    s = Sketch("abs")
    s.input("x", on="ab")
    s.op("scaled", "x", on="b", cheap=True)
    s.op("used", "scaled", on="s")
    found = cross(s)
    assert (found.runs["scaled"], found.sent) == (workers("b"), {"scaled": ("b", ("s",))})


def test_what_needs_values_of_different_workers_is_computed_once() -> None:
    s = Sketch("abcd")
    s.input("x", on="ab")
    s.input("y", on="cd")
    s.op("sum", "x", "y", on="a", cheap=True)
    s.op("used", "sum", on="b")
    found = cross(s)
    assert found.runs["sum"] == workers("a")
    assert found.sent == {"y": ("c", ("a",)), "sum": ("a", ("b",))}


# ---- what cannot be


def test_what_nobody_has_is_refused() -> None:
    s = Sketch()
    s.add("x", "saved", kind="saved", present=())
    s.op("y", "x", on="b")
    with pytest.raises(ArgumentError, match=r"x \(saved\) is needed on b; nobody has it"):
        cross(s)


def test_what_crosses_only_while_it_is_small_is_held_for_sure_only_where_it_was_made() -> None:
    s = Sketch("abc")
    s.op("x", on="a")
    s.op("y", "x", on="b")
    s.outputs.append(Output("y", ("a", "b", "c"), True, if_small=True))
    found = cross(s)
    assert found.sent == {"x": ("a", ("b",)), "y": ("b", ("a", "c"))}
    assert (found.if_small, found.holds["y"]) == (workers("y"), workers("b"))
    edge = analyze(s.graph()).plan.edges[1]
    assert (edge.name, edge.if_small, edge.kind, edge.nbytes, edge.birthplace) == ("y", True, BOUNDED, SMALL, "")


def test_what_crosses_anyway_goes_to_all_who_want_it() -> None:
    s = Sketch("abc")
    s.op("y", on="b")
    s.op("z", "y", on="a")
    s.outputs.append(Output("y", ("a", "b", "c"), True, if_small=True))
    found = cross(s)
    assert found.sent == {"y": ("b", ("a", "c"))}
    assert (found.if_small, found.holds["y"]) == (frozenset(), workers("abc"))
