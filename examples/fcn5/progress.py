"""Live progress of one worker: a bar on a terminal, else a line every five seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

BAR_SECONDS = 0.2
LINE_SECONDS = 5.0


class Progress:
    """``with Progress("training", "step") as progress: progress.show(3, 100, "loss 0.5")``; silent if ``quiet``."""

    def __init__(self, what: str, unit: str, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._what, self._unit = what, unit
        self._bar = None if quiet or not sys.stdout.isatty() else _bar()
        self._every = LINE_SECONDS if self._bar is None else BAR_SECONDS
        self._last = -LINE_SECONDS
        self._task = None if self._bar is None else self._bar.add_task(what, total=None, count="", text="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, total: int | None, text: str) -> None:
        """Called as often as you like; shown at first, now and then, and when all is done."""
        now = time.monotonic()
        if self._quiet or (now - self._last < self._every and done != total):
            return
        self._last = now
        count = f"{self._unit} {done:,}{f' of {total:,}' if total is not None else ''}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, count=count, text=text, refresh=True)
        else:
            print(f"{self._what}: {count}, {text}", flush=True)


def _bar() -> RichProgress:
    # Refreshed by show() alone: a thread of its own would take time from a worker that has one core.
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TextColumn("{task.fields[text]}"),
        console=Console(),
        auto_refresh=False,
    )
