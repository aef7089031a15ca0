"""The parts of a step, from intervals made by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorwire.errors import ArgumentError
from tensorwire.observe.spans import Clock, Span
from tensorwire.trace.intervals import common, length, union, within, without
from tensorwire.trace.parts import Parts, parts_of_spans, parts_of_trace, read_trace, steps_of_spans, typical

# Points on a grid of whole seconds, so that sums are exact.
intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda p: (float(min(p)), float(max(p)))))


def step(number: int, compute: float, push: float, wait: float, end: float) -> list[Span]:
    """One worker's step: compute, push and wait begin at these moments."""
    return [Span("compute", number, compute, push), Span("push", number, push, wait), Span("wait", number, wait, end)]


def test_causes_of_waiting_are_distinguished() -> None:
    workers = {0: step(2, 0, 10, 11, 30), 1: step(2, 0, 20, 22, 30)}
    server = [("update", 2, 23.0, 25.0), ("update", 2, 26.0, 28.0)]
    first, second = parts_of_spans(workers, server)
    # Worker 0 waits from 11: idle until worker 1 pushes at 20; of the ten seconds left four are updates.
    assert first == Parts(0, 2, seconds=30, compute=10, update=4, exposed=1 + 6, idle=9)
    assert second == Parts(1, 2, seconds=30, compute=20, update=4, exposed=2 + 4, idle=0)
    assert first.accounted == first.seconds


def test_an_update_that_is_hidden_behind_compute_or_pushing_is_no_part() -> None:
    (part,) = parts_of_spans({0: step(2, 0, 10, 14, 16)}, [("update", 2, 8.0, 15.0)])
    assert part == Parts(0, 2, seconds=16, compute=10, update=1, exposed=4 + 1, idle=0)


def test_an_update_beside_a_peers_compute_counts_as_update() -> None:
    workers = {0: step(2, 0, 1, 2, 10), 1: step(2, 0, 8, 9, 10)}
    part = parts_of_spans(workers, [("update", 2, 4.0, 6.0)])[0]
    assert (part.update, part.idle, part.exposed) == (2, 4, 1 + 2)


def test_updates_of_several_servers_count_once() -> None:
    part = parts_of_spans({0: step(2, 0, 1, 2, 10)}, [("update", 2, 3.0, 7.0), ("update", 2, 5.0, 8.0)])[0]
    assert (part.update, part.exposed) == (5, 1 + 3)


def test_only_the_same_round_matters() -> None:
    workers = {0: step(2, 0, 1, 2, 10), 1: step(3, 0, 8, 9, 10)}
    part = parts_of_spans(workers, [("update", 1, 3.0, 7.0), ("update", 3, 3.0, 7.0)])[0]
    assert (part.update, part.idle, part.exposed) == (0, 0, 9)


def test_a_step_lasts_until_the_next_begins() -> None:
    first, last = parts_of_spans({0: step(2, 0, 5, 6, 8) + step(3, 9, 12, 13, 14)}, [])
    assert (first.seconds, first.accounted) == (9, 8)
    assert (last.seconds, last.accounted) == (5, 5)


def test_rounds_without_compute_are_no_steps() -> None:
    assert [p.step for p in parts_of_spans({0: [("wait", 1, 0.0, 1.0), *step(2, 1, 2, 3, 4)]}, [])] == [2]


def test_communication_beside_compute_is_hidden_and_keeps_what_it_takes_of_the_thread() -> None:
    """With overlap: pushes inside backward, waits inside the next forward, copies and transfers beside both."""
    own: list[Span] = [
        *(Span("compute", 2, 0, 10), Span("push", 2, 4, 5), Span("push", 2, 7, 8), Span("transfer", 2, 5, 11)),
        *(Span("copy", 2, 2, 3), Span("copy", 2, 7, 8), Span("push", 2, 10, 11)),
        *(Span("compute", 3, 11, 20), Span("wait", 2, 12, 16), Span("transfer", 3, 18, 19, "server 0, bucket 1")),
        *(Span("push", 3, 20, 21), Span("wait", 3, 21, 22)),
    ]
    back = [("transfer", 2, 11.0, 14.0, "worker 0, bucket 0"), ("transfer", 2, 16.0, 17.0, "worker 1, bucket 0")]
    peer = step(2, 0, 13, 13.5, 14)
    first, second = parts_of_spans({0: own, 1: peer}, [("update", 2, 14.0, 15.0), *back])[:2]
    assert first == Parts(0, 2, seconds=11, compute=8, update=0, exposed=3, idle=0, hidden=1 + 5 - 1)
    # Of the wait for version 2, worker 1 still computed for it until 13; one second was the update.
    assert second == Parts(0, 3, seconds=11, compute=5, update=1, exposed=1 + 1 + 2, idle=1, hidden=1 + 1)
    assert first.accounted == first.seconds
    assert second.accounted == second.seconds


def test_two_stores_in_one_process_take_turns() -> None:
    """A discriminator and a generator: each store numbers its rounds, and computes from its last step to its next."""
    first = [*step(2, 0, 2, 3, 4), *step(3, 4, 14, 15, 16)]
    second = [*step(2, 0, 8, 9, 10), *step(3, 10, 20, 21, 22)]
    found = parts_of_spans({0: [*first, *second], 1: []}, [("update", 2, 3.0, 3.5), ("update", 3, 21.5, 22.0)])
    assert [(p.step, p.seconds, p.compute, p.update, p.exposed) for p in found] == [
        (2, 4, 2, 0.5, 1.5),
        (2, 6, 4, 0, 2),
        (3, 6, 4, 0, 2),
        (3, 6, 4, 0.5, 1.5),
    ]
    assert sum(p.accounted for p in found) == 22


def test_a_step_that_the_job_ended_in_is_left_out() -> None:
    (part,) = parts_of_spans({0: [*step(2, 0, 5, 6, 8), Span("compute", 3, 8, 9)]}, [])
    assert (part.step, part.seconds) == (2, 8)


def test_parts_are_printed_with_their_times() -> None:
    (found,) = steps_of_spans({0: step(2, 0, 1, 2, 10)}, [("update", 2, 3.0, 7.0)])
    assert (found.start, found.stop) == (0, 10)
    assert found.when == {
        "compute": [(0, 1)],
        "update": [(3, 7)],
        "exposed": [(1, 3), (7, 10)],
        "idle": [],
        "hidden": [],
    }


def test_the_typical_step_adds_up_where_workers_take_turns_in_waiting() -> None:
    odd = [Parts(0, n, 100, 100, 0, 0, 0) for n in range(3)]  # left out
    parts = [Parts(w, n, 10, 6, 1, 1, 2 if (n + w) % 2 else 0) for w in (0, 1) for n in range(3, 11)]
    parts = [Parts(p.worker, p.step, p.accounted, p.compute, p.update, p.exposed, p.idle) for p in parts]
    found = typical([*parts, *odd, *(Parts(1, n, 100, 100, 0, 0, 0) for n in range(3))])
    assert found.step == len(parts)
    assert found.accounted == found.seconds == 9
    assert found.idle == 1


def test_outliers_do_not_move_the_typical_step() -> None:
    parts = [Parts(0, n, 10, 10, 0, 0, 0) for n in range(11)] + [Parts(0, 11, 1000, 10, 0, 990, 0)]
    assert typical(parts).exposed == 0


def test_no_steps_are_an_error() -> None:
    with pytest.raises(ArgumentError, match="no step after the first 3"):
        typical([Parts(0, n, 1, 1, 0, 0, 0) for n in range(3)])


@given(intervals, intervals)
def test_intervals_are_cut_without_loss(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> None:
    points = {x for a, b in first for x in range(int(a), int(b))}
    others = {x for a, b in second for x in range(int(a), int(b))}
    assert length(first) == len(points)
    assert length(common(first, second)) == len(points & others)
    assert length(without(first, second)) == len(points - others)
    assert length(within(union(first), 5, 20)) == len(points & set(range(5, 20)))
    merged = union(first)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))


def test_a_trace_is_read_by_role(tmp_path: Path) -> None:
    def write(process: str, spans: list[Span]) -> None:
        record = {"process": process, "facts": {}, "counters": {}, "spans": spans}
        (tmp_path / f"{process}.json").write_text(json.dumps(record))

    write("worker-0", step(2, 0, 1, 2, 10))
    write("server-0", [("update", 2, 3.0, 5.0)])
    write("server-1", [("update", 2, 6.0, 7.0)])
    (part,) = parts_of_trace(read_trace(tmp_path))
    assert part == Parts(0, 2, seconds=10, compute=1, update=3, exposed=1 + 5, idle=0)


def test_records_of_several_machines_come_onto_one_clock(tmp_path: Path) -> None:
    def write(process: str, spans: list[Span], offset: float) -> None:
        record = {"process": process, "facts": {}, "counters": {}, "spans": spans, "clock": Clock(offset, 1e-4)}
        (tmp_path / f"{process}.json").write_bytes(msgspec.json.encode(record))

    write("worker-0", step(2, 0, 1, 2, 10), 0.0)
    write("server-0", [Span("update", 2, 1003.0, 1005.0)], -1000.0)
    (part,) = parts_of_trace(read_trace(tmp_path))
    assert part.update == 2


def test_a_torn_trace_can_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "worker-0.json").write_text("[1, 2")
    assert read_trace(tmp_path, torn=True) == {}


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="holds no trace"):
        read_trace(tmp_path)
    (tmp_path / "worker-0.json").write_text("[1, 2")
    with pytest.raises(ArgumentError, match="is not a trace"):
        read_trace(tmp_path)
