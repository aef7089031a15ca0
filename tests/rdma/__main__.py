"""``python -m tests.rdma``: runs the tests that need RDMA, or a command of yours, in machines with Soft-RoCE."""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from tests.rdma import kernel, pair, wire
from tests.rdma.errors import Hung, Impossible, say
from tests.rdma.host import ready
from tests.rdma.machine import Job, Machine

ABOUT = """Runs CMD in a virtual machine with two Soft-RoCE devices, rxa and rxb, on one cable; or, with --two, in two
machines with one device each (rxe0), on one cable. The guest sees this machine's files, read-only, and runs CMD as
root in the current folder. Without a command: the project's own tests (or the PARTs of them that are named)."""
DEAD_SECONDS = 540.0


def main(arguments: list[str]) -> int:
    """The exit status: the command's; 0 also if nothing can be booted here, but then 1 under CI."""
    options, commands = parse(arguments)
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGHUP, _terminated)
    try:
        if not commands:
            from tests.rdma import suite

            return suite.run(options.parts, options.only)
        return run(options, commands)
    except Impossible as error:
        return refused(str(error))
    except Hung as error:
        say(str(error))
        return 124
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[list[str]]]:
    """The options, and the commands behind ``--``."""
    split = [list(group) for dashes, group in itertools.groupby(arguments, lambda word: word == "--") if not dashes]
    own = [] if arguments[:1] == ["--"] or not split else split.pop(0)
    parser = argparse.ArgumentParser(
        prog="python -m tests.rdma", usage="%(prog)s [options] [PART... | -- CMD [-- CMD2]]", description=ABOUT
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="harness, guest, two or slow")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEST", help="a test of the PARTs; may be repeated"
    )
    parser.add_argument("--two", action="store_true", help="two machines; CMD2 runs in the second (default: CMD)")
    parser.add_argument("--timeout", type=float, default=DEAD_SECONDS, help="seconds until it is ended (%(default)s)")
    parser.add_argument("--cpus", type=int, help="of a guest (2, or 1 each with --two)")
    parser.add_argument("--memory", type=int, default=3072, help="MiB of a guest (%(default)s)")
    parser.add_argument("--writable", type=Path, help="a folder of this machine that the guest may write to")
    options = parser.parse_args(own)
    if len(split) > 1 + options.two or (split and options.parts):
        parser.error("one command behind --, or two with --two")
    return options, split


def run(options: argparse.Namespace, commands: list[list[str]]) -> int:
    """One command, in one guest or two."""
    ready()
    image = kernel.image()
    writable = options.writable.absolute() if options.writable else None
    common = {"memory": options.memory, "writable": writable}
    if options.two:
        jobs = [
            Job(command, wire.one_of_two(i), name=f"vm{i + 1}", cpus=options.cpus or 1, **common)
            for i, command in enumerate((commands * 2)[:2])
        ]
        return pair.run(image, jobs, options.timeout)
    job = Job(commands[0], wire.BOTH, cpus=options.cpus or 2, **common)
    with Machine(image, job, to_user) as machine:
        return machine.wait(options.timeout)


def to_user(name: str, data: bytes) -> None:
    """A guest's output is ours."""
    os.write(1 if name == "out" else 2, data)


def refused(reason: str) -> int:
    """A skip where people work; a failure where the tests are a promise."""
    if os.environ.get("CI") == "true":
        say(f"FAILED: {reason}")
        return 1
    say(f"SKIPPED: {reason}")
    return 0


def _terminated(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
