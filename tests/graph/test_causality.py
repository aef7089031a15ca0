"""What each worker can know of the others."""

from __future__ import annotations

import random

import pytest

from tensorwire.graph import Graph, analyze
from tensorwire.graph.passes.assignment import assign
from tensorwire.graph.passes.causality import sends_before, walk
from tensorwire.graph.passes.crossing import Crossings, crossings
from tests.graph.programs import Writer
from tests.graph.sketch import Sketch


def known(s: Sketch, at: str, by: str) -> dict[str, str]:
    """How far ``by`` knows each worker to be when node ``at`` is to run: the name of the last node it knows done."""
    graph = s.graph()
    crossing = crossings(graph, assign(graph))
    for place, knows in walk(graph, crossing):
        if graph.nodes[place].name == at:
            return {worker: graph.nodes[last].name if last >= 0 else "" for worker, last in knows[by].items()}
    raise AssertionError(at)


def test_a_received_value_implies_all_that_its_sender_knew_when_it_was_sent() -> None:
    s = Sketch("abc")
    s.parameter("w", on="b")
    s.op("early", on="b")
    s.op("x", "w", on="a")
    s.op("y", "x", on="b")
    s.op("z", "y", on="c")
    s.op("later", on="c")
    s.op("last", "z", on="a")
    assert known(s, "early", "a") == {"a": "", "b": "", "c": ""}
    assert known(s, "x", "a") == {"a": "", "b": "w", "c": ""}
    assert known(s, "last", "a") == {"a": "x", "b": "y", "c": "z"}


# ---- what cannot come before something has been sent


def needed(graph: Graph, crossing: Crossings, me: str, value: str) -> set[tuple[str, str]]:
    """By brute force: all sends of ``me`` without which its source cannot compute a value."""
    found, seen = set(), set()
    waiting = [(value, crossing.sent[value][0])]
    while waiting:
        name, at = waiting.pop()
        if (name, at) in seen:
            continue
        seen.add((name, at))
        source, targets = crossing.sent.get(name, ("", ()))
        if at in targets:
            found |= {(name, at)} if source == me else set()
            waiting.append((name, source))
        elif at in crossing.runs.get(name, ()):
            waiting += [(operand, at) for operand in graph.node(name).inputs]
    return found


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed: int) -> None:
    graph = Writer(random.Random(seed), 2 + seed % 3, 30).program.graph()
    crossing = analyze(graph).crossing
    for me in graph.workers:
        found = sends_before(graph, crossing, me)
        for value, (_, targets) in crossing.sent.items():
            if me in targets:
                sends = needed(graph, crossing, me, value)
                last = max(sends, key=lambda send: (graph.place[send[0]], send[1]), default=None)
                assert found.get(value) == last
