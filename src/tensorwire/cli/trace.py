"""``tensorwire trace``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorwire.errors import ArgumentError
from tensorwire.tables import print_table

if TYPE_CHECKING:
    from tensorwire.trace.parts import Parts, ProcessTrace

_MOST_NAMES = 3  # of files in a title
_COLUMNS = ("step", "compute", "update", "exposed", "idle", "hidden")


@click.command(short_help="Say where the time of a job's steps went.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--plot", metavar="PICTURE", help="Draw the steps; a .png, .svg or .pdf.")
def trace(files: tuple[str, ...], plot: str | None) -> None:
    """Say where the time of a job's steps went.

    FILE is what tensorwire run --trace wrote (of several machines: one of each), or a folder of TENSORWIRE_TRACE.

    \b
    compute  the model's own work, and whatever else the script does
    update   waiting while a server applied the rule
    exposed  pushing, and waiting for bytes
    idle     waiting for another worker
    hidden   communication beside compute; not in the sum
    """
    from tensorwire.trace.parts import WARM_UP_STEPS, parts_of_trace, settled, typical

    if plot is not None:
        from tensorwire.charts.figure import check_picture

        check_picture(plot, option="--plot")
    records = _read(files)
    parts = parts_of_trace(records)
    if not parts:
        raise ArgumentError(f"{', '.join(files)}: no worker has a whole step in it")
    skip = WARM_UP_STEPS if settled(parts) else 0
    workers = sorted({p.worker for p in parts})
    rows = [(f"worker {w}", typical((p for p in parts if p.worker == w), skip=skip)) for w in workers]
    _show([*rows, ("all", typical(parts, skip=skip))] if len(rows) > 1 else rows)
    wrong = max(record.clock.error for record in records.values())
    if wrong:
        click.echo(f"the clocks of the machines agree to {wrong * 1e3:.3f} ms")
    if plot is not None:
        from tensorwire.charts.steps import plot_steps

        plot_steps(plot, records, of=_recorded(files))


def _recorded(files: Sequence[str]) -> str:
    """Which files, and when the last of them was written: at the end of its job."""
    names = ", ".join(Path(file).resolve().name for file in files[:_MOST_NAMES])
    more = f" and {len(files) - _MOST_NAMES} more" if len(files) > _MOST_NAMES else ""
    latest = max(Path(file).stat().st_mtime for file in files)
    return f"{names}{more} · {datetime.fromtimestamp(latest):%Y-%m-%d %H:%M}"


def _read(files: Sequence[str]) -> dict[str, ProcessTrace]:
    from tensorwire.trace.chrome import read_chrome
    from tensorwire.trace.parts import read_trace

    records: dict[str, ProcessTrace] = {}
    for file in files:
        found = read_trace(file) if Path(file).is_dir() else read_chrome(file)
        twice = sorted(records.keys() & found.keys())
        if twice:
            raise ArgumentError(
                f"{file}: {twice[0].replace('-', ' ')} is in another file, too: are these files of one job?"
            )
        records |= found
    return records


def _cells(step: Parts) -> list[str]:
    cells = [f"{step.seconds * 1e3:,.2f} ms"]
    for name in _COLUMNS[1:]:
        seconds = getattr(step, name)
        cells.append(f"{seconds * 1e3:,.2f} ms {seconds / step.seconds:4.0%}")
    return cells


def _show(rows: Sequence[tuple[str, Parts]]) -> None:
    print_table(("typical of", "steps", *_COLUMNS), [(name, f"{step.step:,}", *_cells(step)) for name, step in rows])
