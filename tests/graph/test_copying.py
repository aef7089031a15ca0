"""Copies, predicted from a plan."""

from __future__ import annotations

from tensorwire.graph import Output, analyze
from tensorwire.graph.ir import Unknown
from tensorwire.graph.kinds import SMALL
from tensorwire.graph.passes.copying import Copies
from tests.graph.sketch import Sketch


def of(sketch: Sketch) -> dict[str, Copies]:
    return {one.worker: one for one in analyze(sketch.graph()).plan.copies}


def test_what_is_born_lent_or_by_value_is_not_copied() -> None:
    s = Sketch()
    s.parameter("w", on="a")
    s.op("x", on="a")
    s.op("small", on="a", shape=(4,))
    s.op("y", "w", "x", "small", on="b")
    s.out("y")
    assert of(s) == {}


def test_what_users_get_is_copied_where_it_is_made_and_where_it_goes() -> None:
    s = Sketch("abc")
    s.op("x", on="a")
    s.outputs.append(Output("x", ("a", "b", "c"), True))
    sent, received = Copies("a", 1, 1, 0, 256, 0), Copies("b", 1, 0, 1, 256, 0)
    assert of(s) == {"a": sent, "b": received, "c": Copies("c", 1, 0, 1, 256, 0)}


def test_what_was_kept_is_copied_once_for_all_targets() -> None:
    s = Sketch("abc")
    s.saved("x", on="a")
    s.op("y", "x", on="b")
    s.op("z", "x", on="c")
    assert of(s) == {"a": Copies("a", 1, 1, 0, 256, 0)}


def test_gaps_are_not_copied() -> None:
    s = Sketch()
    s.add("x", "saved", shape=(4, 16), stride=(32, 1), kind="saved", present=("a",))
    s.op("y", "x", on="b")
    assert of(s)["a"].nbytes == 256


def test_copies_of_a_bounded_tensor_have_its_bound() -> None:
    s = Sketch()
    s.add("bounded", "saved", shape=(Unknown("s0", 32), 8), kind="saved", present=("a",))
    s.add("any", "saved", shape=(Unknown("s1"), 8), kind="saved", present=("a",))
    s.op("y", "bounded", "any", on="b")
    s.op("z", on="b", shape=(Unknown("s1"),))
    s.outputs.append(Output("z", ("a", "b"), True, if_small=True))
    found = of(s)
    assert found["a"] == Copies("a", 3, 2, 1, 32 * 8 * 4 + SMALL, 1)
    assert found["b"] == Copies("b", 1, 1, 0, SMALL, 0)
