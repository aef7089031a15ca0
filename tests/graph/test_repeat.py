"""Many equal layers from one that was traced are the same graph as if all had been."""

from __future__ import annotations

import pytest

from tensorwire.errors import ArgumentError
from tensorwire.graph import Graph, analyze
from tensorwire.graph.repeat import find_layer, repeat, with_present
from tests.graph.sketch import Sketch

NAMES = ("", ".1", ".2")


def forward(hosts: str) -> Sketch:
    """Layers behind an embedding, in front of a head: each multiplies what enters, and adds it to that."""
    s = Sketch("ab")
    s.input("text")
    s.parameter("table", on="a")
    for i, host in enumerate(hosts):
        s.parameter(f"w{NAMES[i]}", on=host)
    s.parameter("last", on="b")
    s.op("x", "text", "table", on="a")
    s.op("mask", "text", on="a", cheap=True, shape=(32,))
    enters = "x"
    for i, host in enumerate(hosts):
        s.op(f"product{NAMES[i]}", enters, f"w{NAMES[i]}", "mask", on=host, shape=(8, 8))
        s.view(f"flat{NAMES[i]}", f"product{NAMES[i]}", on=host)
        enters = s.op(f"sum{NAMES[i]}", enters, f"flat{NAMES[i]}", on=host)
    s.op("loss", enters, "last", on="b", shape=())
    s.out("loss", "ab", caller=True)
    saved = ["x", *(f"sum{NAMES[i]}" for i in range(len(hosts))), *(f"w{NAMES[i]}" for i in range(len(hosts)))]
    for name in (*saved, "mask"):
        s.out(name)
    return s


def backward(hosts: str) -> Sketch:
    s = Sketch("ab")
    count = len(hosts)
    for name in ("x", *(f"sum{NAMES[i]}" for i in range(count)), *(f"w{NAMES[i]}" for i in range(count)), "mask"):
        s.saved(name, on="a")
    s.input("tangent", shape=())
    grad = s.op("head", "tangent", f"sum{NAMES[count - 1]}", on="b")
    for i in reversed(range(count)):
        entered = f"sum{NAMES[i - 1]}" if i else "x"
        s.op(f"dw{NAMES[i]}", grad, entered, "mask", on=hosts[i], shape=(8, 8))
        s.op(f"dx{NAMES[i]}", grad, f"w{NAMES[i]}", on=hosts[i])
        grad = s.op(f"grad{NAMES[i]}", grad, f"dx{NAMES[i]}", on=hosts[i])
    s.op("dtable", grad, on="a")
    s.out("dtable", "a", caller=True)
    for i, host in enumerate(hosts):
        s.out(f"dw{NAMES[i]}", host, caller=True)
    return s


LAYER = {"product", "flat", "sum"}
BACK = {"dw", "dx", "grad"}


def same(one: Graph, other: Graph) -> None:
    assert sorted(one.nodes, key=lambda n: n.name) == sorted(other.nodes, key=lambda n: n.name)
    assert sorted(one.outputs, key=lambda o: o.name) == sorted(other.outputs, key=lambda o: o.name)


def test_forward_and_backward() -> None:
    one = forward("a").graph()
    layer = find_layer(one, LAYER, 3)
    assert (layer.enters, layer.leaves, layer.nodes) == ("x", "sum", frozenset({*LAYER, "w"}))
    three = repeat(one, layer, "abb")
    same(three, forward("abb").graph())

    holds = analyze(three).crossing.holds
    traced = backward("a").graph()
    behind = repeat(traced, find_layer(traced, BACK, 3, backward=True), "abb", forward=layer)
    same(with_present(behind, holds), with_present(backward("abb").graph(), holds))
    order = [node.name for node in behind.nodes]
    assert order.index("grad.2") < order.index("dw.1") < order.index("grad.1") < order.index("dw")


def test_the_plan_is_that_of_all_layers() -> None:
    one = forward("a").graph()
    three = repeat(one, find_layer(one, LAYER, 3), "aba")
    crossing = [(edge.name, edge.source, edge.targets) for edge in analyze(three).plan.edges]
    assert crossing == [(e.name, e.source, e.targets) for e in analyze(forward("aba").graph()).plan.edges]
    assert crossing


def test_what_the_caller_passes_may_enter() -> None:
    s = Sketch()
    s.input("x")
    s.parameter("w", on="a")
    s.op("y", "x", "w", on="a")
    s.op("z", "y", on="a", shape=())
    graph = s.graph()
    twice = repeat(graph, find_layer(graph, {"y"}, 2), "ab")
    assert [(node.name, node.inputs, node.host) for node in twice.nodes if node.op == "op"] == [
        ("y", ("x", "w"), "a"),
        ("y.1", ("y", "w.1"), "b"),
        ("z", ("y.1",), "a"),
    ]


def test_once_is_the_graph_itself() -> None:
    one = forward("a").graph()
    same(repeat(one, find_layer(one, LAYER, 1), "a"), one)


def test_as_many_hosts_as_layers() -> None:
    one = forward("a").graph()
    with pytest.raises(ArgumentError, match="3 layers have as many hosts, not 2"):
        repeat(one, find_layer(one, LAYER, 3), "ab")


def test_it_must_be_plain_what_goes_from_layer_to_layer() -> None:
    one = forward("a").graph()
    with pytest.raises(ArgumentError, match=r"2 values leave the layer \(product, sum\), not one"):
        find_layer(one, {"product", "sum"}, 2)
    longer = forward("a")
    longer.op("more", "loss")
    graph = longer.graph()
    with pytest.raises(ArgumentError, match="loss leaves the layer, and nothing of its shape enters"):
        find_layer(graph, {"loss"}, 2)
    with pytest.raises(ArgumentError, match="0 values leave the layer"):
        find_layer(one, set(), 2)
