"""How the harness ends when it cannot do what it is asked to."""

from __future__ import annotations

import sys


class Impossible(Exception):
    """This machine cannot boot a guest; the message says why. A reason to skip, but for continuous integration."""


class Hung(Exception):
    """A guest did not boot, broke off, or did not end in time; the message ends with its console."""


def say(what: str) -> None:
    """One line of what the harness does, on stderr: stdout belongs to the command in the guest."""
    print(f"test-rdma: {what}", file=sys.stderr, flush=True)
