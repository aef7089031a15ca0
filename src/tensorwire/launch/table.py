"""The table of a job: one row per process, from its members' reports."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tensorwire.control.coordinator import Report
from tensorwire.control.frames import Stats
from tensorwire.sizes import size_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

# Rates are those of the last reports; one comes every second.
HISTORY = 10
STATS_SECONDS = 1.0
COLUMNS = ("step", "steps/s", "compute", "push", "wait", "update", "sent")
# What a narrow terminal does without, from the first.
DISPENSABLE = ("push", "sent", "update", "steps/s", "compute", "wait")
NOTE_WIDTH = 8
# Of the values that scripts report.
MOST_VALUES = 6


class Rates:
    """A member's progress between two of its reports."""

    def __init__(self) -> None:
        self._history: deque[Report] = deque(maxlen=HISTORY)
        self._first: Report | None = None
        self._counted: Report | None = None  # the first that knew how many steps there will be

    def add(self, report: Report) -> None:
        """A report, once or more often."""
        # Nothing was done when it joined, and that was one report before its first.
        self._first = self._first or Report(Stats(0, {}, {}), report.at - STATS_SECONDS)
        if not self._history or report.at > self._history[-1].at:
            self._history.append(report)
        if self._counted is None and report.stats.total:
            self._counted = report

    def cells(self) -> list[str]:
        """What the columns of `COLUMNS` show."""
        if not self._history:
            return [""] * len(COLUMNS)
        assert self._first is not None
        last, before = self._history[-1], self._history[0]
        if last.stats.steps == before.stats.steps:
            before = self._first  # few steps, or such that last longer than the history
        seconds = last.at - before.at
        steps = last.stats.steps - before.stats.steps
        rate = f"{steps / seconds:.3g}" if steps and seconds > 0 else "-"
        return [f"{last.stats.steps:,}", rate, *self._shares(before, last), self._sent(before, last)]

    def said(self, names: Sequence[str]) -> list[str]:
        """What the script reported: samples a second, the time remaining, and the latest values of ``names``."""
        if not self._history:
            return [""] * (2 + len(names))
        last = self._history[-1].stats
        values = [f"{last.values[name]:.4g}" if name in last.values else "" for name in names]
        return [self._samples(), self._left(), *values]

    def _samples(self) -> str:
        assert self._first is not None
        last, before = self._history[-1], self._history[0]
        if last.stats.samples == before.stats.samples:
            before = self._first
        samples, seconds = last.stats.samples - before.stats.samples, last.at - before.at
        return f"{samples / seconds:,.4g}" if samples and seconds > 0 else ""

    def _left(self) -> str:
        """From the pace since it was first known: evaluations and checkpoints count, too."""
        last, before = self._history[-1], self._counted
        if before is None or last.stats.step >= last.stats.total:
            return ""
        steps, seconds = last.stats.step - before.stats.step, last.at - before.at
        return _passed((last.stats.total - last.stats.step) * seconds / steps) if steps > 0 else ""

    def _shares(self, before: Report, last: Report) -> list[str]:
        spent = {
            name: last.stats.seconds.get(name, 0.0) - before.stats.seconds.get(name, 0.0)
            for name in ("compute", "push", "wait", "update")
        }
        # A worker's time is these three; a server's is counted by the clock, for it also waits for workers.
        whole = spent["compute"] + spent["push"] + spent["wait"]
        worker = [f"{spent[name] / whole:.0%}" if whole > 0 else "" for name in ("compute", "push", "wait")]
        passed = last.at - before.at
        server = f"{min(1.0, spent['update'] / passed):.0%}" if passed > 0 and spent["update"] > 0 else ""
        return [*worker, server]

    def _sent(self, before: Report, last: Report) -> str:
        seconds = last.at - before.at
        if seconds <= 0:
            return ""
        sent = sum(last.stats.counters.get(n, 0) - before.stats.counters.get(n, 0) for n in ("bytes", "mapped_bytes"))
        return f"{size_text(sent / seconds)}/s"


class JobTable:
    """Renders the job. ``stats`` gives the members' latest reports; ``names`` are the rows."""

    def __init__(self, names: Sequence[str], stats: Callable[[], Mapping[str, Report]]) -> None:
        self._names, self._stats = list(names), stats
        self._rates = {name: Rates() for name in names}
        self._began = time.monotonic()
        self._gone: dict[str, str] = {}

    def leave(self, name: str, how: str) -> None:
        """The process ``name`` has ended, and how."""
        self._gone[name] = how

    def __call__(self, unfinished: Mapping[str, str]) -> Picture:
        """The table as it is now. ``unfinished``: the line each process is still writing."""
        said = []
        for name, report in self._stats().items():
            if name in self._rates:
                self._rates[name].add(report)
                said.append(report.stats)
        names = list(dict.fromkeys(name for stats in said for name in stats.values))[:MOST_VALUES]
        more = ["samples/s", "left", *names] if any(s.values or s.samples or s.total for s in said) else []
        rows = [[name, *self._rates[name].cells()] for name in self._names]
        if more:
            rows = [[*row, *self._rates[row[0]].said(names)] for row in rows]
        notes = [self._gone.get(name) or unfinished.get(name, "") for name in self._names]
        return Picture([f"elapsed {_passed(time.monotonic() - self._began)}", *COLUMNS, *more], rows, notes)


class Picture:
    """A table that fits the terminal: where that is narrow, some columns are left out."""

    def __init__(self, head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> None:
        self._head, self._rows, self._notes = head, rows, notes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", expand=False)
        kept, room = self._fit(options.max_width)
        for at in kept:
            table.add_column(Text(self._head[at]), justify="right" if at else "left", no_wrap=True)
        table.add_column("", no_wrap=True)
        for row, note in zip(self._rows, self._notes, strict=True):
            text = Text.from_ansi(note)
            text.truncate(room, overflow="ellipsis")
            table.add_row(*(row[at] for at in kept), text)
        yield table

    def _fit(self, width: int) -> tuple[list[int], int]:
        """The columns that there is room for, and how much of it they leave for notes."""
        widths = [2 + max(len(row[at]) for row in [self._head, *self._rows]) for at in range(len(self._head))]
        kept = list(range(len(self._head)))
        first = [1 + COLUMNS.index(column) for column in DISPENSABLE]
        for at in [*first, *reversed(range(1 + len(COLUMNS), len(self._head)))]:
            if sum(widths[at] for at in kept) + NOTE_WIDTH > width:
                kept.remove(at)
        return kept, max(0, width - sum(widths[at] for at in kept) - 2)


def _passed(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
