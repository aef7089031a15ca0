"""The command ``tensorwire``."""

from __future__ import annotations

import contextlib
import os
import sys

import click

from tensorwire.cli.audit import audit
from tensorwire.cli.bench import bench
from tensorwire.cli.doctor import doctor
from tensorwire.cli.mount import ls, mount
from tensorwire.cli.plan.command import plan
from tensorwire.cli.run import run
from tensorwire.cli.trace import trace
from tensorwire.cli.versions import versions
from tensorwire.errors import ArgumentError, TensorwireError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tensorwire")
def group() -> None:
    """Train across processes and machines by one-sided writes.

    \b
    Start here:
      tensorwire doctor
      tensorwire run --workers 2 --servers 1 -- python train.py
    """


group.add_command(run)
group.add_command(bench)
group.add_command(doctor)
group.add_command(plan)
group.add_command(trace)
group.add_command(audit)
group.add_command(versions)
group.add_command(ls)
group.add_command(mount)


def main() -> None:
    """Entry point of ``tensorwire``."""
    run_command(group, "tensorwire")


def run_command(command: click.Command, name: str) -> None:
    """Runs a command with the words in ``sys.argv``, then ends the process: errors are one line."""
    _open_streams()
    try:
        status = command(prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else name
        _complain(f"{error.format_message().rstrip('.')}: see {where} --help")
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except ArgumentError as error:
        _complain(error)
        sys.exit(2)
    except TensorwireError as error:
        _complain(error)
        sys.exit(1)
    except BrokenPipeError:  # tensorwire run --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    sys.exit(status if isinstance(status, int) else 0)


def _open_streams() -> None:
    """Where a shell closed them (``>&-``), sockets would take the numbers of standard output and error."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, "w")  # noqa: SIM115 (it lives as long as the process)
            os.dup2(nowhere.fileno(), number)
            setattr(sys, name, nowhere)


def _complain(what: object) -> None:
    with contextlib.suppress(OSError):
        click.echo(f"tensorwire: {what}", err=True)
