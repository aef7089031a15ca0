"""What members tell the coordinator of themselves, and how their clocks are compared."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from tensorwire.control import clock, frames
from tensorwire.control.coordinator import Coordinator
from tensorwire.errors import ProtocolError
from tensorwire.observe import counters, spans
from tests.control import wire
from tests.control.conftest import Jobs


def reports(coordinator: Coordinator, name: str, count: int) -> list[frames.Stats]:
    """The next ``count`` different reports of a member."""
    found: list[frames.Stats] = []
    last = 0.0
    while len(found) < count:
        report = coordinator.stats.get(name)
        if report is not None and report.at != last:
            found.append(report.stats)
            last = report.at
    return found


def test_members_report_what_they_have_done(jobs: Jobs) -> None:
    coordinator = jobs.coordinator(stats_every=0.01)
    client = jobs.client(coordinator)
    (before,) = reports(coordinator, "worker 0", 1)
    rpcs = counters.rpcs
    client.publish("key", b"value")
    for step in (2, 3):
        spans.add("compute", step, 0.0, 0.5)
    after = reports(coordinator, "worker 0", 3)[-1]
    assert after.steps - before.steps in (1, 2)  # whether the number of an earlier test's last step was 2
    assert after.seconds["compute"] - before.seconds.get("compute", 0.0) == 1.0
    assert after.counters["rpcs"] == rpcs + 1  # reports are none


def test_nobody_reports_who_was_not_asked(jobs: Jobs) -> None:
    asked, quiet = jobs.coordinator(stats_every=0.01), jobs.coordinator()
    jobs.client(quiet)
    jobs.client(asked, "launcher", 1)
    assert [t.name for t in threading.enumerate() if t.name == "tensorwire-stats"] == []


def test_the_last_report_comes_before_the_goodbye(jobs: Jobs) -> None:
    ended: queue.SimpleQueue[object] = queue.SimpleQueue()
    coordinator = jobs.coordinator(workers=1, stats_every=1000.0, on_end=ended.put)
    client = jobs.client(coordinator)
    spans.add("wait", 2, 0.0, 0.25)
    client.close(goodbye=True)
    assert ended.get() is None
    assert coordinator.stats["worker 0"].stats.seconds["wait"] >= 0.25


def test_reports_are_signs_of_life_and_nothing_else(jobs: Jobs) -> None:
    coordinator = jobs.coordinator()
    with wire.joined(coordinator) as sock:
        sock.sendall(frames.encode(frames.Stats(7, {"bytes": 3}, {})))
        sock.sendall(frames.encode(frames.Lookup(1, "nothing", 0.0)))
        assert wire.receive(sock).type == "WaitTimeout"
    assert coordinator.stats["worker 0"].stats == frames.Stats(7, {"bytes": 3}, {})


def test_processes_of_one_machine_share_a_clock(jobs: Jobs) -> None:
    found = jobs.client(jobs.coordinator()).clock()
    assert (found.offset, found.error) == (0.0, 0.0)


def test_the_fastest_trip_measures_another_machines_clock(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the coordinator claims to be elsewhere, and its clock to be 1000 seconds ahead."""
    client = jobs.client(jobs.coordinator())
    monkeypatch.setattr("tensorwire.control.coordinator.pack_time", lambda: elsewhere(time.monotonic() + 1000))
    found = client.clock()
    assert 0 < found.error < 5
    assert abs(found.offset - 1000) <= found.error


def elsewhere(seconds: float) -> bytes:
    """An answer of another machine."""
    return clock.msgspec.msgpack.encode(["another machine", seconds])


def test_slow_trips_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 4.0, 10.0, 12.0, *(x for n in range(6) for x in (20.0 + 10 * n, 28.0 + 10 * n))])
    monkeypatch.setattr(clock.time, "monotonic", lambda: next(now))
    there = iter([50.0, 61.5, *(70.0 + 10 * n for n in range(6))])
    found = clock.distance(lambda: elsewhere(next(there)))
    assert (found.offset, found.error) == (61.5 - 11.0, 1.0)


def test_an_answer_that_is_no_time_is_refused() -> None:
    with pytest.raises(ProtocolError, match="what time it is"):
        clock.distance(lambda: b"\xc1")
