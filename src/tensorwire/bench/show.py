"""The output of a benchmark: progress while it runs, then one table; JSON for programs, Markdown for documentation."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from tensorwire.bench.records import Record, time_text
from tensorwire.observe.files import save_file
from tensorwire.progress import progress
from tensorwire.tables import print_table

HEAD = ("what", "mode", "who", "median", "fastest - slowest", "rate", "of the limit", "target", "")

_VERDICTS = {"met": Text("met", style="green"), "MISSED": Text("MISSED", style="red")}
_LARGE = 65536  # bytes; of a smaller transfer the rate says nothing


class Notes:
    """What is shown beside the results: progress on a terminal's last line, and what was skipped, on standard error."""

    def __init__(self, update: Callable[[str], None], say: Callable[[str], None]) -> None:
        self._update = update
        self._say = say
        self._told: set[str] = set()

    def progress(self, text: str) -> None:
        """What is being done now."""
        self._update(text)

    def skip(self, text: str) -> None:
        """Something that is not measured, and why; once."""
        self.say(f"skipped: {text}")

    def say(self, text: str) -> None:
        """A line that stays; once."""
        if text not in self._told:
            self._told.add(text)
            self._say(text)


@contextlib.contextmanager
def notes() -> Iterator[Notes]:
    """On a terminal a spinner with the latest progress; else a line for each workload, and one if it starts slowly."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("starting") as status:
            yield Notes(lambda text: status.update(text), lambda text: console.print(text, markup=False))
        return
    seen: set[str] = set()

    def update(text: str) -> None:
        starting.close()
        workload = text.partition(":")[0]
        if workload not in seen:
            seen.add(workload)
            print(f"measuring {workload}", file=sys.stderr, flush=True)

    with contextlib.ExitStack() as starting:
        starting.enter_context(progress("starting what is measured"))
        yield Notes(update, lambda text: print(text, file=sys.stderr, flush=True))


def row(record: Record) -> tuple[str, ...]:
    """A record's cells."""
    large = record.bytes_per_second is not None and record.bytes >= _LARGE
    rate = f"{(record.bytes_per_second or 0) / 1e9:.3g} GB/s" if large else ""
    share = ""
    if record.ratio is not None and record.peer != record.limit:
        share = f"{record.ratio:.{0 if record.ratio >= 100 else 2}f} of {record.limit}"
    verdict = "" if record.met is None else ("met" if record.met else "MISSED")
    spread = f"{time_text(record.low)} - {time_text(record.high)}"
    return (
        record.workload,
        record.mode,
        record.peer,
        time_text(record.seconds),
        spread,
        rate,
        share,
        record.target or "",
        verdict,
    )


def table(records: Sequence[Record], machine: Sequence[str]) -> None:
    """Prints the results."""
    rows = [None if cells is None else [*cells[:8], _VERDICTS.get(cells[8], "")] for cells in _grouped(records)]
    print("\n".join(machine))
    print_table(HEAD, rows, left=(0, 1, 2, 7, 8), caption="\n".join(hows(records)))


def markdown(records: Sequence[Record], machine: Sequence[str]) -> str:
    """The same for docs/benchmarks.md."""
    lines = ["|".join(("", *HEAD, "")), "|".join(("", *["---"] * len(HEAD), ""))]
    lines += ["| " + " | ".join(cells) + " |" for cells in _grouped(records) if cells is not None]
    return "\n".join([*lines, "", *(f"{line}  " for line in [*hows(records), *machine])])


def hows(records: Sequence[Record]) -> list[str]:
    """A line for each way in which somebody was run, where that is told."""
    return list(dict.fromkeys(f"{record.peer}: {record.how}" for record in records if record.how))


def write_json(path: str, records: Sequence[Record], machine: Sequence[str]) -> None:
    """One list of records. Raises `ArgumentError` for a file that cannot be written."""
    listed = [{**asdict(record), "machine": " | ".join(machine)} for record in records]
    save_file(path, (json.dumps(listed, indent=1) + "\n").encode(), option="--json")


def _grouped(records: Sequence[Record]) -> Iterator[tuple[str, ...] | None]:
    before: tuple[str, str] | None = None
    for record in records:
        cells, key = row(record), (record.workload, record.mode)
        if key == before:
            yield ("", "", *cells[2:])
            continue
        if before is not None:
            yield None
        before = key
        yield cells
