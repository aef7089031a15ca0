"""What each worker can know of the others."""

from __future__ import annotations

from tensorwire.graph.passes.assignment import assign
from tensorwire.graph.passes.causality import walk
from tensorwire.graph.passes.crossing import crossings
from tests.graph.sketch import Sketch


def known(s: Sketch, at: str, by: str) -> dict[str, str]:
    """How far ``by`` knows each worker to be when node ``at`` is to run: the name of the last node it knows done."""
    graph = s.graph()
    crossing = crossings(graph, assign(graph))
    for place, knows in walk(graph, crossing):
        if graph.nodes[place].name == at:
            return {worker: graph.nodes[last].name if last >= 0 else "" for worker, last in knows[by].items()}
    raise AssertionError(at)


def test_who_received_nothing_knows_nothing() -> None:
    s = Sketch()
    s.op("x", on="a")
    s.op("y", "x", on="b")
    s.op("z", on="a")
    assert known(s, "z", "a") == {"a": "x", "b": ""}


def test_a_received_value_implies_its_senders_earlier_steps() -> None:
    s = Sketch()
    s.op("x", on="a")
    s.op("y", "x", on="b")
    s.op("later", "y", on="b")
    s.op("z", "y", on="a")
    assert known(s, "z", "a") == {"a": "x", "b": "y"}


def test_a_value_implies_nothing_before_it_is_used() -> None:
    s = Sketch()
    s.op("x", on="a")
    s.op("y", "x", on="b")
    s.op("other", on="a")
    s.op("z", "y", on="a")
    assert known(s, "other", "a")["b"] == ""


def test_a_third_worker_passes_on_what_it_knows() -> None:
    s = Sketch("abc")
    s.op("x", on="a")
    s.op("y", "x", on="b")
    s.op("z", "y", on="c")
    s.op("last", "z", on="a")
    assert known(s, "last", "a") == {"a": "x", "b": "y", "c": "z"}


def test_a_parameter_implies_only_that_it_was_sent() -> None:
    s = Sketch()
    s.parameter("w", on="b")
    s.op("early", on="b")
    s.op("x", "w", on="a")
    assert known(s, "x", "a") == {"a": "", "b": "w"}
