"""Why workers of a graph wait, from spans made by hand."""

from __future__ import annotations

from tensorwire.observe.edge_names import edge_of
from tensorwire.observe.spans import Span
from tensorwire.trace.parts import Parts, parts_of_spans


def push(edge: str, start: float, stop: float, *, graph: str = "0 (forward)", run: int = 1) -> Span:
    """A worker sends ``edge``."""
    return Span("push", run, start, stop, edge_of(graph, edge))


def wait(edge: str, start: float, stop: float, *, graph: str = "0 (forward)", run: int = 1) -> Span:
    """A worker waits for ``edge``."""
    return Span("wait", run, start, stop, edge_of(graph, edge))


def step(number: int, start: float, stop: float, *crossed: Span) -> list[Span]:
    """One step of a loop around a model that is cut."""
    return [*crossed, Span("compute", number, start, stop)]


def test_waiting_is_idle_until_the_tensor_is_sent_and_exposed_from_then_on() -> None:
    maker = step(1, 0, 20, push("y", 8, 9))  # it computes on while the tensor is on its way
    user = step(1, 0, 20, wait("y", 2, 12))
    first, second = parts_of_spans({0: maker, 1: user}, [])
    assert first == Parts(0, 1, seconds=20, compute=19, update=0, exposed=1, idle=0)
    assert second == Parts(1, 1, seconds=20, compute=10, update=0, exposed=4, idle=6)


def test_what_had_been_sent_before_is_exposed_alone() -> None:
    spans = {0: step(1, 0, 20, push("y", 1, 2)), 1: step(1, 0, 20, wait("y", 5, 6))}
    assert (parts_of_spans(spans, [])[1].exposed, parts_of_spans(spans, [])[1].idle) == (1, 0)


def test_the_same_name_in_another_graph_or_run_is_another_tensor() -> None:
    maker = step(1, 0, 20, push("y", 2, 3), push("y", 9, 10, graph="1 (backward)"), push("y", 15, 16, run=2))
    user = step(1, 0, 20, wait("y", 4, 11, graph="1 (backward)"), wait("y", 12, 17, run=2))
    part = parts_of_spans({0: maker, 1: user}, [])[1]
    assert (part.idle, part.exposed) == (5 + 3, 2 + 2)


def test_who_waits_for_one_that_waits_shares_its_cause() -> None:
    """Worker 2 waits for worker 1, and that for worker 0, who computes until 6; its tensor arrives at 8."""
    spans = {
        0: step(1, 0, 20, push("x", 6, 7)),
        1: step(1, 0, 20, wait("x", 1, 8), push("y", 10, 11)),
        2: step(1, 0, 20, wait("y", 0, 12)),
    }
    last = parts_of_spans(spans, [])[2]
    # Idle while 1 computes (0 to 1 and 8 to 10) and while 0 does (1 to 6); 6 to 8 and 10 to 12 are communication.
    assert (last.idle, last.exposed) == (1 + 2 + 5, 2 + 2)


def test_a_third_worker_that_computes_is_not_waited_for() -> None:
    """Worker 1 waits for what worker 0 sent; worker 2 computes something else meanwhile."""
    spans = {
        0: step(1, 0, 20, push("x", 3, 4)),
        1: step(1, 0, 20, wait("x", 3, 9)),
        2: step(1, 0, 20, push("z", 19, 20)),
    }
    part = parts_of_spans(spans, [])[1]
    assert (part.idle, part.exposed) == (0, 6)


def test_clocks_that_contradict_each_other_make_no_ring() -> None:
    spans = {
        0: step(1, 0, 20, wait("y", 1, 9), push("x", 10, 11)),
        1: step(1, 0, 20, wait("x", 1, 9), push("y", 10, 11)),
    }
    assert [part.accounted for part in parts_of_spans(spans, [])] == [20, 20]


def test_waiting_for_memory_is_idle_while_others_compute() -> None:
    """Also in the midst of a push, which is then no communication."""
    keeper = step(1, 0, 20, wait("x", 12, 15))
    sender = step(1, 0, 20, push("x", 10, 15), wait("memory of worker 1", 10, 14))
    first, second = parts_of_spans({0: sender, 1: keeper}, [])
    assert (first.idle, first.exposed, first.compute) == (2, 2 + 1, 15)
    assert (second.idle, second.exposed) == (0, 3)


def test_a_step_ends_with_its_compute_and_a_pause_belongs_to_none() -> None:
    spans = [*step(1, 0, 10, wait("y", 1, 2)), *step(2, 1000, 1010, wait("y", 1001, 1002, run=2))]
    assert [(p.seconds, p.accounted) for p in parts_of_spans({0: spans, 1: []}, [])] == [(10, 10), (10, 10)]


def test_a_store_beside_a_graph_ends_the_step() -> None:
    """Data parallel training of a model that is cut: the store's pushes and waits follow compute."""
    spans = [*step(1, 0, 10, wait("y", 1, 2)), Span("push", 1, 10, 11), Span("wait", 1, 11, 14, "server 0, bucket 0")]
    (part,) = parts_of_spans({0: spans}, [("update", 1, 12.0, 13.0)])
    assert part == Parts(0, 1, seconds=14, compute=9, update=1, exposed=1 + 1 + 2, idle=0)


def test_transfers_beside_compute_are_hidden() -> None:
    moving = Span("transfer", 1, 2, 6, edge_of("0 (forward)", "y"))
    (part,) = parts_of_spans({0: step(1, 0, 10, push("y", 2, 3), moving)}, [])
    assert (part.hidden, part.exposed, part.compute) == (3, 1, 9)
