"""Spans of time: each process's activities by step, on the machine's monotonic clock.

Totals by name are always kept. If ``TENSORWIRE_TRACE`` names a folder, each process also keeps the spans and writes
``ROLE-INDEX.json`` there when it leaves.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tensorwire.observe.counting import counters
from tensorwire.observe.files import write_file

clock = time.monotonic  # one clock for all processes of a machine


class Span(NamedTuple):
    """From ``start`` to ``stop`` in seconds; ``what``: with whom and which bucket, such as ``server 0, bucket 3``."""

    name: str
    step: int
    start: float
    stop: float
    what: str = ""


@dataclass(slots=True)
class Total:
    """All spans of one name so far. ``steps``: how often their step was another than that of the span before."""

    spans: int = 0
    seconds: float = 0.0
    steps: int = 0
    last: int = -1


class Clock(msgspec.Struct, frozen=True):
    """The offset of the coordinator's clock from this process's, in seconds, and its possible error."""

    offset: float = 0.0
    error: float = 0.0


class Spans:
    """The latest spans of this process; old ones are dropped. Any thread may add.

    Args:
        folder: Where ``write`` puts a file; None: spans are not recorded, only their totals.
        limit: How many spans are kept.

    Attributes:
        enabled: Whether spans are recorded.
        clock: How this process's clock relates to that of the job.
        facts: Further values for the file, by name.
    """

    def __init__(self, folder: str | None = None, limit: int = 400_000) -> None:
        self.folder = folder
        self.enabled = folder is not None
        self.clock = Clock()
        self.facts: dict[str, Any] = {}
        self._spans: deque[tuple[str, int, float, float, str]] = deque(maxlen=limit)
        self._totals: dict[str, Total] = {}
        # Pushes and waits since the last compute: with overlap they lie inside the next one, and are not compute.
        self._inner: deque[tuple[float, float]] = deque(maxlen=4096)
        self._lock = threading.Lock()

    def add(self, name: str, step: int, start: float, stop: float, what: str = "") -> None:
        """Counts one span, and records it if recording is enabled.

        Args:
            name: The activity, such as ``"compute"``, ``"push"`` or ``"wait"``.
            step: The step to which it belongs.
            start: When it began, in seconds of ``time.monotonic``.
            stop: When it ended, in the same seconds.
            what: The peer, and the bucket or edge.
        """
        seconds = stop - start
        with self._lock:
            if name == "compute":
                seconds -= sum(s for began, s in self._inner if start <= began < stop)
                self._inner.clear()
            elif name in ("push", "wait"):
                self._inner.append((start, seconds))
            total = self._totals.get(name)
            if total is None:
                total = self._totals[name] = Total()
            total.spans += 1
            total.seconds += seconds
            if step != total.last:
                total.last = step
                total.steps += 1
            if self.enabled:
                self._spans.append((name, step, start, stop, what))

    def totals(self) -> dict[str, Total]:
        """Adds up all spans.

        Returns:
            Number and seconds of all spans by name; ``compute`` without the pushes and waits inside it.
        """
        with self._lock:
            return {name: replace(total) for name, total in self._totals.items()}

    def __len__(self) -> int:
        return len(self._spans)

    def write(self, process: str) -> Path | None:
        """Writes the recorded spans, with the counters and ``facts``, to ``FOLDER/process.json``.

        Args:
            process: The name of this process, such as ``"worker-0"``.

        Returns:
            The file; None if nothing is recorded, or it cannot be written.
        """
        if self.folder is None:
            return None
        folder = Path(self.folder)
        path = folder / f"{process}.json"
        with self._lock:
            recorded = list(self._spans)
        record = {
            "process": process,
            "machine": socket.gethostname(),
            "clock": self.clock,
            "facts": self.facts,
            "counters": asdict(counters.snapshot()),
            "spans": recorded,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(path, msgspec.json.encode(record))
        except OSError as error:  # a trace is not worth a good run
            logging.getLogger("tensorwire").warning("no trace of %s: %s", process, error)
            return None
        return path


spans = Spans(os.environ.get("TENSORWIRE_TRACE") or None)
"""The spans of this process, recorded if ``TENSORWIRE_TRACE`` names a folder."""
