"""``tensorwire run``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tensorwire.control.settings import MOST_MACHINES, MOST_MEMBERS, MOST_ON_A_MACHINE
from tensorwire.device.registry import AUTO, BUILT_IN_FOR_JOBS, find_job_device
from tensorwire.errors import ArgumentError


def _device(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """``auto``, or the name of a device of ours or of an installed package."""
    try:
        if value != AUTO:
            find_job_device(value)
    except ArgumentError as error:
        raise click.BadParameter(str(error)) from None
    return value


def _fates(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is not None and any(Path(value).glob("*.jsonl")):
        raise click.BadParameter(f"{value} has fates of another job: name a new folder")
    return value


@click.command(
    short_help="Run a script as the workers of a job.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.option(
    "--workers",
    type=click.IntRange(1, MOST_ON_A_MACHINE),
    default=1,
    show_default=True,
    help="Workers on this machine.",
)
@click.option(
    "--servers",
    type=click.IntRange(0, MOST_ON_A_MACHINE),
    default=1,
    show_default=True,
    help="Servers on this machine; 0 where nothing is kept in a store.",
)
@click.option(
    "--min-workers",
    type=click.IntRange(1, MOST_MEMBERS),
    metavar="N",
    help="Go on without workers that are lost, as long as N are left. Without it the first loss ends the job.",
)
@click.option(
    "--restart",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="With --min-workers: start another worker in the place of one that is lost, up to N times for each.",
)
@click.option("--rendezvous", metavar="HOST:PORT", help="Several machines: where node 0 listens.")
@click.option(
    "--nodes", type=click.IntRange(1, MOST_MACHINES), default=1, show_default=True, help="How many machines take part."
)
@click.option(
    "--node",
    type=click.IntRange(0, MOST_MACHINES - 1),
    default=0,
    show_default=True,
    help="Which of them this is, from 0.",
)
@click.option(
    "--device",
    metavar=f"[{'|'.join((AUTO, *BUILT_IN_FOR_JOBS))}|NAME]",
    callback=_device,
    default=AUTO,
    show_default=True,
    envvar="TENSORWIRE_DEVICE",
    help="The transport; NAME: a device of an installed package.",
)
@click.option("--no-prefix", is_flag=True, help="Processes keep this terminal: no names before lines, no table.")
@click.option("--metrics", metavar="[HOST:]PORT", help="Serve OpenMetrics of all processes there; port 0: any.")
@click.option("--trace", metavar="FILE", help="Write a trace of this machine's processes when the job has ended.")
@click.option("--tensorboard", metavar="DIR", help="Write what job.report() gets to TensorBoard files in DIR.")
@click.option(
    "--checkpoints",
    type=click.Path(exists=True, file_okay=False, writable=True, resolve_path=True),
    metavar="DIR",
    help="Show DIR in the job's folder, see tensorwire mount.",
)
@click.option(
    "--fates", metavar="DIR", callback=_fates, help="Write what became of every push there, for tensorwire audit."
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(no_prefix: bool, trace: str | None, **options: Any) -> int:
    """Run COMMAND as the workers of a job, with parameter servers beside them.

    \b
    One machine:
      tensorwire run --workers 2 --servers 1 -- python train.py
    Two machines, on each (with --node 1 on the second):
      export TENSORWIRE_SECRET_FILE=~/.tensorwire-secret
      tensorwire run --rendezvous HOST:PORT --nodes 2 --node 0 --workers 1 --servers 1 -- python train.py

    The job ends with the first process that fails; what went wrong is said once, and the exit status is that process's.
    With --min-workers it goes on without workers that are killed, stopped, cut off, or end by an exception.
    Ctrl-C ends the job; a second one does not wait for it. On a terminal a table shows every process's steps, and where
    their time goes.

    \b
    Environment: TENSORWIRE_DEVICE for --device, and in seconds:
      TENSORWIRE_TIMEOUT          how long a step may wait for other workers (1800)
      TENSORWIRE_FAILURE_TIMEOUT  of silence, after which a process counts as lost (10)
      TENSORWIRE_GRACE            that a process may take to leave by itself after the job failed (5)
    """
    from tensorwire.launch.launcher import Launcher, RunOptions
    from tensorwire.launch.scarce import as_out_of_memory
    from tensorwire.trace.collect import TraceFile

    gathered = None if trace is None else TraceFile(trace)
    asked = RunOptions(prefix=not no_prefix, trace=gathered, **options)
    with as_out_of_memory():
        return Launcher(asked)()
