"""``tensorwire doctor``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from tensorwire.cli.interrupts import interruptible
from tensorwire.errors import ArgumentError
from tensorwire.progress import progress
from tensorwire.tables import print_table

if TYPE_CHECKING:
    from tensorwire.doctor import Finding, Section

_COLOURS = {"fine": "green", "note": "yellow", "stops": "red"}


@click.command(short_help="Say what is here, and what would stop a job.")
@click.option("--between", nargs=2, type=click.IntRange(1), metavar="PID PID", help="Which device these two would get.")
@click.option("--peer", metavar="HOST:PORT", help="Try to connect there, such as to the rendezvous of a job.")
@click.option("--json", "as_json", is_flag=True, help="Print it for programs.")
def doctor(between: tuple[int, int] | None, peer: str | None, as_json: bool) -> int:
    """Say what is here, what would stop a job, and which device a pair of processes would get, and why.

    Looks at memory and its limits, the kernel, sockets, interfaces and settings, and really opens every device.

    \b
    Exit status: 0 if nothing would stop a job, else 1, with a line for each thing that says what to do.
    """
    if between is not None and between[0] == between[1]:
        raise ArgumentError("--between needs two processes")
    with interruptible(), progress("looking at this machine") as report:
        from tensorwire.doctor import examine

        sections = examine(pids=between, address=peer, report=report)
    stops = [finding for section in sections for finding in section.findings if finding.level == "stops"]
    if as_json:
        _print_json(sections, sound=not stops)
    elif sys.stdout.isatty():
        _print_tables(sections)
    else:
        _print_lines(sections)
    for finding in stops:
        click.echo(f"tensorwire: {finding.name}: {finding.value}: {finding.advice}", err=True)
    return 1 if stops else 0


def _words(finding: Finding) -> str:
    """The finding's value, and what to do about it."""
    return f"{finding.value} ({finding.advice})" if finding.advice and finding.level == "note" else finding.value


def _print_json(sections: list[Section], *, sound: bool) -> None:
    import msgspec

    record = {"sound": sound, "sections": sections}
    click.echo(msgspec.json.format(msgspec.json.encode(record), indent=2))


def _print_lines(sections: list[Section]) -> None:
    for section in sections:
        click.echo(section.title)
        for finding in section.findings:
            click.echo(f"  {finding.level:5}  {finding.name}: {_words(finding)}")


def _print_tables(sections: list[Section]) -> None:
    from rich.text import Text

    for section in sections:
        rows = [(Text(f.level, style=_COLOURS[f.level]), f.name, _words(f)) for f in section.findings]
        print_table(("", "", ""), rows, left=(0, 1, 2), title=section.title)
