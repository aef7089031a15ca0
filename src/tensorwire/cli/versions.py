"""``tensorwire versions``."""

from __future__ import annotations

import click

from tensorwire.sizes import counted
from tensorwire.tables import print_table

_PHASES = ("pause", "read", "verify", "convert")


@click.command(short_help="List a job's versions of weights, and who reads them.")
@click.argument("job", required=False)
@click.option(
    "--number", default=0, show_default=True, type=click.IntRange(0), help="Which optimizer or KeyValue with publish=."
)
@click.option("--timeout", default=10.0, show_default=True, type=click.FloatRange(0), help="Seconds to wait for it.")
def versions(job: str | None, number: int, timeout: float) -> None:
    """List a job's versions of weights, and who reads them.

    JOB is its name, as job.name has it, for a job of this user on this machine; without it, the only one. Or
    HOST:PORT, the address of its coordinator, with the secret in TENSORWIRE_SECRET_FILE.

    \b
    pause, read, verify, convert: milliseconds that the phases of taking a version over took
    """
    from tensorwire.launch.reading import connect

    with connect(job, number=number, timeout=timeout) as reader:
        found, me = reader.listing(), reader.name
        rows = [(each.name, f"{each.step:,}", each.state) for each in found.versions]
        print_table(("version", "step", "state"), rows, left=(0, 2))
        others = sorted((each for each in found.readers if each.reader != me), key=lambda each: -each.counter)
        print(f"\n{counted(len(others), 'reader')}")
        if not others:
            return
        print_table(
            ("reader", "version", "step", *_PHASES),
            [
                (
                    each.machine,
                    each.version or "none yet",
                    f"{each.step:,}" if each.counter else "",
                    *(f"{1e3 * each.seconds[p]:,.1f}" if p in each.seconds else "" for p in _PHASES),
                )
                for each in others
            ],
            left=(0, 1),
        )
