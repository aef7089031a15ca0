"""Tables: by rich on a terminal, else in plain columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click


def show(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> None:
    """Prints ``rows`` of cells under ``head``. ``left``: the columns that are words, not numbers."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        shown = Table(box=box.SIMPLE_HEAD)
        for number, column in enumerate(head):
            shown.add_column(column, justify="left" if number in left else "right", no_wrap=number not in left)
        for row in rows:
            shown.add_row(*map(Text, row))
        Console().print(shown)
        return
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        click.echo("  ".join(cells).rstrip())
