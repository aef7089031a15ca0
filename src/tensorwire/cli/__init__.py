"""The command ``tensorwire``."""

from __future__ import annotations

import sys

import click

from tensorwire.cli.run import run
from tensorwire.errors import TensorwireError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tensorwire")
def group() -> None:
    """Train across processes and machines by one-sided writes.

    \b
    Start here:
      tensorwire run --workers 2 --servers 1 -- python train.py
    """


group.add_command(run)


def main() -> None:
    """Entry point: errors of ours are one line."""
    try:
        status = group(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except TensorwireError as error:
        click.echo(f"tensorwire: {error}", err=True)
        sys.exit(2)
    sys.exit(status if isinstance(status, int) else 0)
