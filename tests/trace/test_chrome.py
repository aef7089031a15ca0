"""Chrome traces: what is written can be drawn by any viewer, and read again."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tensorwire.errors import ArgumentError
from tensorwire.observe.spans import Clock, Span
from tensorwire.trace.chrome import read_chrome, write_chrome
from tensorwire.trace.parts import parts_of_trace
from tests.trace.traces import job, record


def written(tmp_path: Path, **options: Any) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "trace.json"
    write_chrome(path, job(**options))
    return path, json.loads(path.read_text())


def test_every_process_has_a_name_and_tracks_without_overlaps(tmp_path: Path) -> None:
    events = written(tmp_path)[1]["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["server 0", "worker 0", "worker 1"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            assert e["ts"] >= 0
            assert e["dur"] >= 0
            tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in tracks.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))
    called = {(names[e["pid"]], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {called[who] for who in called if who[0] == "worker 1"} == {
        *("parts of the step", "compute", "push", "wait", "transfer", "transfer 2")
    }
    assert {(names[pid], tid) for pid, tid in tracks} == set(called)


def test_the_parts_are_there_to_be_seen(tmp_path: Path) -> None:
    events = written(tmp_path, steps=1)[1]["traceEvents"]
    parts = [(e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") == "part" and e["pid"] == 1]
    assert sorted(parts, key=lambda p: p[1]) == [
        ("compute", 0, 4e6),
        ("exposed", 4e6, 1e6),
        ("idle", 5e6, 1e6),
        ("exposed", 6e6, 1e6),
        ("update", 7e6, 1e6),
        ("exposed", 8e6, 0.5e6),
        ("update", 8.5e6, 0.5e6),
        ("exposed", 9e6, 1e6),
    ]


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    trace, found = job(), read_chrome(path)
    assert parts_of_trace(found) == parts_of_trace(trace)
    for name, one in trace.items():
        assert sorted(found[name].spans, key=lambda s: (s.start, s.name)) == sorted(
            one.spans, key=lambda s: (s.start, s.name)
        )
        assert (found[name].facts, found[name].counters, found[name].machine) == (one.facts, one.counters, one.machine)
    assert list(tmp_path.iterdir()) == [path]


def test_machines_are_put_on_one_clock(tmp_path: Path) -> None:
    away = record("worker-1", [Span("compute", 2, 5.0, 6.0)], Clock(100.0, 0.001))
    write_chrome(tmp_path / "t", {"worker-0": record("worker-0", [Span("compute", 2, 104.0, 106.0)]), "worker-1": away})
    found = read_chrome(tmp_path / "t")
    assert found["worker-1"].spans == [Span("compute", 2, 105.0, 106.0)]
    assert found["worker-1"].clock == Clock(0.0, 0.001)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": []}',
        '{"traceEvents": [], "otherData": {"version": "1"}}',
        '{"traceEvents": [{"ph": "X", "pid": 1, "name": "wait", "cat": "span", "args": {"step": "x"}}], "otherData": '
        '{"tensorwire": 1, "origin": 0, "processes": [{"name": "worker-0", "pid": 1, "machine": "", "clock": {}, '
        '"facts": {}, "counters": {}}]}}',
    ],
)
def test_what_is_no_trace_of_ours_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match="is not a trace of tensorwire run --trace") as caught:
        read_chrome(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"cannot read .*: No such file"):
        read_chrome(tmp_path / "nothing")
