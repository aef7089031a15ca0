"""What ``make test-rdma`` runs: the tests of the harness, those of one guest, and those of two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.rdma import kernel, wire
from tests.rdma.errors import say
from tests.rdma.host import ready
from tests.rdma.machine import Job, Machine, Output

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
GUEST_SECONDS = 900.0
# Pairs of devices across the cable; and a few modules with every operation held back.
DEVICE = "tests.rdma.devices:either"
IN_GUEST = ("tests/rdma/guest", "--pyargs", "tensorwire.testing.conformance", "--device", DEVICE)
SUMMARY = re.compile(r"\b\d+ (passed|failed|errors?|skipped|deselected)\b.* in [\d.]+s")


def run(names: list[str]) -> int:
    """Runs the parts that are named, or all; the exit status."""
    parts: dict[str, Callable[[Tally], int]] = {"harness": harness, "guest": guest, "two": two}
    if unknown := set(names) - set(parts):
        say(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
        return 2
    ready()
    image = kernel.image()
    say(f"the guests' kernel: {image.kernel}")
    ends: list[str] = []
    failed = 0
    for name in names or list(parts):
        tally, start = Tally(), time.monotonic()
        status = parts[name](tally)
        failed = failed or status
        ends.append(f"{name}: {tally.summary or f'no summary, status {status}'} ({time.monotonic() - start:.0f} s)")
    for end in ends:
        say(end)
    say("FAILED" if failed else "passed")
    return failed


def guest(tally: Tally) -> int:
    """The conformance suite, and the tests in ``guest``, in one machine with two devices."""
    command = [*PYTEST, *IN_GUEST]
    say(f"one guest, rxa and rxb on one cable: {' '.join(command)}")
    with Machine(kernel.image(), Job(command, wire.BOTH, folder=ROOT), tally) as machine:
        return machine.wait(GUEST_SECONDS)


def two(tally: Tally) -> int:
    """Tests that boot two machines."""
    return _here(tally, "two guests, one cable", "tests/rdma/two")


def harness(tally: Tally) -> int:
    """Tests of the harness itself."""
    return _here(tally, "the harness itself", "tests/rdma/test_harness.py")


def _here(tally: Output, what: str, path: str) -> int:
    command = [*PYTEST, "-s", path]
    say(f"{what}: {' '.join(command)}")
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            tally("out", line)
    return process.returncode


class Tally:
    """Shows output, and remembers pytest's last line."""

    def __init__(self) -> None:
        self.summary = ""
        self._rest = b""
        self._lock = threading.Lock()

    def __call__(self, stream: str, data: bytes) -> None:
        os.write(1 if stream == "out" else 2, data)
        if stream == "out":
            with self._lock:
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    if SUMMARY.search(line.decode(errors="replace")):
                        self.summary = line.decode(errors="replace").strip("= ")
