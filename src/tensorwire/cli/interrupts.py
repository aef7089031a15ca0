"""Ctrl-C in a command that computes: one line, and the exit status that shells expect."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import click


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """What Ctrl-C ends in the block ends the command with one line and status 130."""
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            click.echo("tensorwire: interrupted", err=True)
        raise click.exceptions.Exit(128 + signal.SIGINT) from None
