"""Blocks and arrows, and what is drawn of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorwire.charts.lanes import Panel
from tensorwire.cli.plan.blocks import BORN, BY_VALUE, LENT, Arrow, Block, fold
from tensorwire.cli.plan.drawing import panel, plot_plans
from tensorwire.graph import Unknown, analyze
from tensorwire.torch.graph.planning.plan_model import Planned
from tests.graph.sketch import Sketch


def folded(s: Sketch) -> tuple[list[Block], list[Arrow]]:
    graph = s.graph()
    labels = {node.name: f"layer.{node.name[0]}" for node in graph.nodes}
    blocks, arrows = fold(graph, analyze(graph), labels)
    assert all(arrow.source.level < arrow.target.level for arrow in arrows)  # time goes downwards
    return blocks, arrows


def to_and_fro() -> Sketch:
    s = Sketch("abc")
    s.parameter("w", on="a")
    s.op("p1", on="a")
    s.op("p2", "p1", on="a")
    s.op("q1", "p1", "w", on="b")
    s.op("q2", "p2", on="b")
    s.op("r", "q2", on="a", shape=())
    s.op("s", on="a")
    s.out("r", "c", caller=True)
    return s


def test_operators_fold_into_blocks_and_tensors_into_arrows() -> None:
    blocks, arrows = folded(to_and_fro())
    assert [(b.worker, b.level, b.labels, sum(b.ops.values())) for b in blocks] == [
        ("a", 0, ["layer.p"], 2),
        ("b", 1, ["layer.q"], 2),
        ("a", 2, ["layer.r", "layer.s"], 2),
        ("c", 3, [], 0),
    ]
    crossing = [(a.source.worker, a.target.worker, a.manner, [e.name for e in a.edges]) for a in arrows]
    assert crossing == [
        ("a", "b", BORN, ["p1", "p2"]),
        ("a", "b", LENT, ["w"]),
        ("b", "a", BORN, ["q2"]),
        ("a", "c", BY_VALUE, ["r"]),
    ]


def test_who_has_sent_nothing_yet_waits_without_a_new_block() -> None:
    s = Sketch()
    s.op("early", on="b")
    s.op("p", on="a")
    s.op("late", "p", "early", on="b")
    assert [(b.worker, b.level) for b in folded(s)[0]] == [("b", 1), ("a", 0)]


def test_a_long_conversation_has_a_block_a_turn() -> None:
    s = Sketch()
    for i in range(10):
        s.op(f"n{i}", *([f"n{i - 1}"] if i else []), on="ab"[i % 2])
    blocks, arrows = folded(s)
    assert ([b.level for b in blocks], len(arrows)) == (list(range(10)), 9)


def drawn(s: Sketch) -> Panel:
    graph = s.graph()
    return panel(Planned(graph, analyze(graph), {"p1": "net.0.linear", "p2": "net.1.linear", "s": ""}))


def test_a_panel_says_what_is_computed_and_what_crosses() -> None:
    found = drawn(to_and_fro())
    assert found.title == "sketch: 7 nodes, 5 edges"
    assert found.lanes == {"a": "outbox 4 KiB", "b": "outbox 4 KiB", "c": "outbox 0 B"}
    assert [(box.lane, box.row, box.lines) for box in found.boxes] == [
        ("a", 0, ("net.0", "to net.1", "2 operators")),
        ("b", 1, ("op", "2 operators")),
        ("a", 2, ("the model itself", "2 operators")),
        ("c", 3, ("what the caller gets",)),
    ]
    assert [(m.row, m.source, m.targets, m.kind, m.text) for m in found.messages] == [
        (0, "a", ("b",), "born in registered memory", "2 tensors: 512 B"),
        (0, "a", ("b",), "lent parameter", "w: 256 B"),
        (1, "b", ("a",), "born in registered memory", "q2: 256 B"),
        (2, "a", ("c",), "by value", "r: 4 B"),
    ]


def test_what_goes_to_several_workers_is_one_arrow() -> None:
    s = Sketch("abc")
    s.op("p", on="a")
    s.op("q", "p", on="b")
    s.op("r", "p", on="c")
    (message,) = drawn(s).messages
    assert (message.source, message.targets, message.text) == ("a", ("b", "c"), "p: 256 B")


def test_what_may_have_any_size_says_so() -> None:
    s = Sketch()
    s.op("p", on="a", shape=(Unknown("s0"), 4))
    s.op("q", "p", on="b")
    (message,) = drawn(s).messages
    assert message.text == "p: any size, dynamic"


def test_plans_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    graph = to_and_fro().graph()
    plot_plans(str(tmp_path / "plan.png"), "net", [Planned(graph, analyze(graph), {})] * 2, option="--plot")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
