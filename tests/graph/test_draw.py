"""Blocks and arrows, and the drawing of them."""

from __future__ import annotations

from xml.etree import ElementTree

from tensorwire.graph import analyze
from tensorwire.graph.blocks import BORN, BY_VALUE, LENT, Arrow, Block, fold
from tensorwire.graph.draw import draw
from tests.graph.sketch import Sketch

SVG = "{http://www.w3.org/2000/svg}"


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
    assert [(b.host, b.level, b.labels, sum(b.ops.values())) for b in blocks] == [
        ("a", 0, ["layer.p"], 2),
        ("b", 1, ["layer.q"], 2),
        ("a", 2, ["layer.r", "layer.s"], 2),
        ("c", 3, [], 0),
    ]
    crossing = [(a.source.host, a.target.host, a.manner, [e.name for e in a.edges]) for a in arrows]
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
    assert [(b.host, b.level) for b in folded(s)[0]] == [("b", 1), ("a", 0)]


def test_a_long_conversation_has_a_block_a_turn() -> None:
    s = Sketch()
    for i in range(10):
        s.op(f"n{i}", *([f"n{i - 1}"] if i else []), on="ab"[i % 2])
    blocks, arrows = folded(s)
    assert ([b.level for b in blocks], len(arrows)) == (list(range(10)), 9)


def drawing(s: Sketch) -> ElementTree.Element:
    graph = s.graph()
    return ElementTree.fromstring(draw("two & a half <hosts>", [(graph, analyze(graph), {"p1": "net.0", "s": ""})]))


def test_the_drawing_names_what_is_there() -> None:
    root = drawing(to_and_fro())
    words = [element.text for element in root.iter(f"{SVG}text")]
    for expected in (
        *("two & a half <hosts>", "a", "b", "c", "born in registered memory", "copied once"),
        *("net.0", "2 operators", "2 tensors: 512 B, static", "w: 256 B, static", "r: 4 B, value"),
        *("what the caller gets", "sketch: 7 nodes, 5 edges"),
    ):
        assert expected in words, expected
    assert len(root.findall(f"{SVG}path")) == 4


def test_arrows_differ_in_grey() -> None:
    root = drawing(to_and_fro())
    strokes = {path.get("stroke-dasharray") for path in root.findall(f"{SVG}path")}
    assert len(strokes) == 3


def test_everything_is_on_the_paper() -> None:
    root = drawing(to_and_fro())
    _, _, width, height = map(float, (root.get("viewBox") or "").split())
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("x") is not None:
            assert 0 <= float(rect.get("x") or 0) <= width - float(rect.get("width") or 0)
            assert 0 <= float(rect.get("y") or 0) <= height - float(rect.get("height") or 0)
