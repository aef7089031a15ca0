"""Spans of time: who did what in which step, on the machine's monotonic clock.

Recording is on when ``TENSORWIRE_TRACE`` names a folder; each process writes ``ROLE-INDEX.json`` there when it leaves.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from tensorwire.observe.counting import counters

clock = time.monotonic  # one clock for all processes of a machine


class Spans:
    """The latest spans of this process, as ``(name, step, start, stop)`` in seconds; old ones are dropped."""

    def __init__(self, folder: str | None = None, limit: int = 400_000) -> None:
        self.folder = folder
        self.enabled = folder is not None
        self._spans: deque[tuple[str, int, float, float]] = deque(maxlen=limit)
        self.facts: dict[str, Any] = {}

    def add(self, name: str, step: int, start: float, stop: float) -> None:
        """Records one span; free when recording is off."""
        if self.enabled:
            self._spans.append((name, step, start, stop))

    def __len__(self) -> int:
        return len(self._spans)

    def write(self, process: str) -> Path | None:
        """Writes what was recorded, with the counters and ``facts``, to ``FOLDER/process.json``."""
        if self.folder is None:
            return None
        folder = Path(self.folder)
        path = folder / f"{process}.json"
        record = {
            "process": process,
            "facts": self.facts,
            "counters": asdict(counters.snapshot()),
            "spans": [list(s) for s in self._spans],
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(record))
        except OSError as error:  # a trace is not worth a good run
            logging.getLogger("tensorwire").warning("no trace of %s: %s", process, error)
            return None
        return path


spans = Spans(os.environ.get("TENSORWIRE_TRACE") or None)
