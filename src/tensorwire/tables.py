"""Tables: with frames and colours on a terminal, otherwise in plain columns."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

_WIDEST = 10_000  # columns: what is not a terminal has room for every line


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str | Text] | None],
    *,
    left: Container[int] = (0,),
    title: str = "",
    caption: str = "",
) -> None:
    """Prints rows of cells.

    Args:
        head: The names of the columns, which stand above them unless all are empty.
        rows: The cells. None stands for a rule between two rows, which only a terminal shows.
        left: The numbers of the columns that are words; the others are numbers, and stand to the right.
        title: Stands above the table.
        caption: Stands below it.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    framed = sys.stdout.isatty()
    console = Console(highlight=False) if framed else Console(highlight=False, no_color=True, width=_WIDEST)
    table = Table(
        box=box.SIMPLE_HEAD if framed else None,
        padding=(0, 1) if framed else (0, 2, 0, 0),
        pad_edge=framed,
        show_header=any(head),
    )
    for number, name in enumerate(head):
        words = number in left
        table.add_column(Text(name), justify="left" if words else "right", no_wrap=not words)
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    with console.capture() as printed:
        console.print(table)
    lines = [*([title] if title else []), *(line.rstrip() for line in printed.get().splitlines())]
    print("\n".join([*lines, *([caption] if caption else [])]))
