"""Spans: totals that are always kept, and what is recorded."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from tensorwire.observe.spans import Spans


def test_totals_are_kept_without_recording() -> None:
    spans = Spans()
    for step in (2, 3, 3, 4):
        spans.add("update", step, 1.0, 1.5)
    total = spans.totals()["update"]
    assert (total.spans, total.seconds, total.steps, total.last) == (4, 2.0, 3, 4)
    assert len(spans) == 0
    assert spans.write("worker-0") is None


def test_compute_is_counted_without_the_pushes_and_waits_inside_it() -> None:
    spans = Spans()
    spans.add("compute", 2, 0.0, 10.0)
    spans.add("push", 2, 10.0, 11.0)
    spans.add("wait", 2, 11.0, 12.0)
    spans.add("wait", 2, 13.0, 15.0)  # in the next forward
    spans.add("compute", 3, 12.0, 20.0)
    assert {name: t.seconds for name, t in spans.totals().items()} == {"compute": 16.0, "push": 1.0, "wait": 3.0}


def test_several_threads_lose_no_count(tmp_path: Path) -> None:
    spans = Spans(str(tmp_path))

    def add() -> None:
        for step in range(2000):
            spans.add("update", step, 0.0, 1.0)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (spans.totals()["update"].spans, spans.totals()["update"].seconds, len(spans)) == (8000, 8000.0, 8000)


def test_a_file_says_who_where_and_when(tmp_path: Path) -> None:
    spans = Spans(str(tmp_path), limit=2)
    for bucket in range(3):
        spans.add("transfer", 2, bucket, bucket + 1, f"server 0, bucket {bucket}")
    path = spans.write("worker-0")
    assert path is not None
    record = json.loads(path.read_text())
    assert record["spans"] == [["transfer", 2, b, b + 1, f"server 0, bucket {b}"] for b in (1, 2)]
    assert record["clock"] == {"offset": 0.0, "error": 0.0}
    assert record["machine"]
    assert list(tmp_path.iterdir()) == [path]
