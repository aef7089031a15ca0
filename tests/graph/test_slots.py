"""Slots are used again, and never too early: whatever the order in which workers get on."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorwire.edge.header import HEADER
from tensorwire.graph import Plan, analyze
from tests.graph.programs import Writer
from tests.graph.simulator import Simulation
from tests.graph.sketch import Sketch


def plan(s: Sketch) -> Plan:
    return analyze(s.graph()).plan


def slot(s: Sketch, name: str) -> int | None:
    return next(edge.slot for edge in plan(s).edges if edge.name == name)


def test_a_slot_is_used_again_once_an_answer_says_that_it_was_read() -> None:
    s = Sketch()
    s.op("x", on="a")
    s.op("answer", "x", on="b")
    s.op("next", "answer", on="a")
    s.op("end", "next", on="b")
    assert (slot(s, "x"), slot(s, "next")) == (0, 0)


def test_an_operator_does_not_write_over_its_operands() -> None:
    s = Sketch()
    s.op("x", on="a")
    s.op("answer", "x", on="b")
    s.op("next", "answer", "x", on="a")
    s.op("end", "next", on="b")
    assert slot(s, "next") == 256


def test_an_outbox_is_as_long_as_its_fullest_moment_in_whole_pages() -> None:
    s = Sketch()
    for i in range(100):
        s.op(f"x{i}", *([f"y{i - 1}"] if i else []), on="a", shape=(1024,))
        s.op(f"y{i}", f"x{i}", on="b", shape=(1025,))
    found = plan(s)
    ends = {
        worker: max(e.header for e in found.edges if e.source == worker and e.header is not None) for worker in "ab"
    }
    assert ends == {"a": 4096 + 99 * HEADER, "b": 4160 + 98 * HEADER}  # behind the slots of all
    assert found.outbox == tuple((worker, -(-(end + HEADER) // 4096) * 4096) for worker, end in ends.items())


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), workers=st.integers(2, 4), size=st.integers(4, 80))
def test_every_worker_reads_what_one_process_reads(seed: int, workers: int, size: int) -> None:
    program = Writer(random.Random(seed), workers, size).program
    graph = program.graph()
    analysis = analyze(graph)
    pairs = list(itertools.permutations(graph.workers, 2))
    for schedule, mapped in enumerate((0.0, 1.0, 0.5, 0.5)):
        rng = random.Random(seed + schedule)
        maps = {pair for pair in pairs if rng.random() < mapped}
        Simulation(program, graph, analysis, maps).run(rng)


def test_random_programs_use_slots_again() -> None:
    """Else the property above would show nothing."""
    shared = 0
    for seed in range(20):
        analysis = analyze(Writer(random.Random(seed), 3, 80).program.graph())
        shared += sum(
            n - 1 for n in Counter((e.source, e.slot) for e in analysis.plan.edges if not e.birthplace).values()
        )
    assert shared > 20
