"""``tensorwire audit``."""

from __future__ import annotations

import click

from tensorwire.tables import print_table


@click.command(short_help="Check that every push of gradients has exactly one fate.")
@click.argument("paths", nargs=-1, required=True, metavar="FOLDER|FILE...")
def audit(paths: tuple[str, ...]) -> int:
    """Check that every push of gradients has exactly one fate.

    FOLDER is what tensorwire run --fates wrote (of several machines: name one of each). FILE is one of its files, or
    several put together. What the workers sent is compared with what the servers did with it. The exit status is 1 if
    it does not add up, or if a process of the job left no log, or one without an end: it still runs, failed or was
    killed. A worker that is lost while the job goes on is none of these: what it sent was counted in a file.

    \b
    applied    led to a new version by itself
    merged     led to a new version together with others
    discarded  changed nothing
    lost       was not in the server's memory when its worker was lost
    """
    from tensorwire.trace.push_fates import by_job, problems, read_fates, totals

    jobs = by_job(read_fates(paths))
    found = []
    for job, lines in jobs.items():
        if len(jobs) > 1:
            click.echo(f"job {job}")
        head = ("store", "worker", "produced", "applied", "merged", "discarded", "lost", "why")
        rows = [
            (
                t.store,
                str(t.worker),
                "?" if t.produced is None else f"{t.produced:,}",
                *(f"{n:,}" for n in (t.applied, t.merged, t.discarded, t.lost)),
                "; ".join(t.reasons),
            )
            for t in totals(lines)
        ]
        print_table(head, rows, left=(0, 7))
        for problem in (here := problems(lines)):
            click.echo(problem)
        found += here
    if not found:
        click.echo("every push has one fate")
    return 1 if found else 0
