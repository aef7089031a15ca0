"""What ``make test-rdma`` runs: the tests of the harness, those of one guest, and those of two.

What takes long runs with ``ARGS=slow``: more of the harness, conformance where every operation is held back, and jobs
of MXNet and TensorFlow in two guests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tensorwire.testing.patience import patient
from tensorwire.testing.spec import DELAYED
from tests.rdma import kernel, pair, wire
from tests.rdma.errors import Hung, say
from tests.rdma.host import ready
from tests.rdma.machine import Job, Machine

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=10", "--durations-min=5")
GUEST_SECONDS = patient(900.0)
SUITE = ("--pyargs", "tensorwire.testing.conformance")
DEVICE = "--device=tests.rdma.devices:either"
SUMMARY = re.compile(r"\b\d+ (passed|failed|errors?|skipped|deselected)\b.* in [\d.]+s")


def run(names: list[str], only: Sequence[str] = ()) -> int:
    """Runs the parts that are named, or all but ``slow``; of each the tests ``only``. The exit status."""
    parts: dict[str, Callable[[Tally, Sequence[str]], int]] = {
        "harness": harness,
        "guest": guest,
        "two": two,
        "slow": slow,
    }
    if unknown := set(names) - set(parts):
        say(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
        return 2
    ready()
    image = kernel.image()
    say(f"the guests' kernel: {image.kernel}")
    ends: list[str] = []
    failed = 0
    for name in names or [part for part in parts if part != "slow"]:
        tally, start = Tally(), time.monotonic()
        try:
            status = parts[name](tally, only)
        except Hung as error:
            say(str(error))
            status = 124
        failed = failed or status
        ends.append(f"{name}: {tally.summary or f'no summary, status {status}'} ({time.monotonic() - start:.0f} s)")
    for end in ends:
        say(end)
    say("FAILED" if failed else "passed")
    return failed


def guest(tally: Tally, only: Sequence[str]) -> int:
    """The conformance suite, and the tests in ``guest``, in one machine with two devices."""
    return _in_guest(tally, *(only or ("tests/rdma/guest", *SUITE)), DEVICE)


def _in_guest(tally: Tally, *arguments: str) -> int:
    command = [*PYTEST, *arguments]
    say(f"one guest, rxa and rxb on one cable: {' '.join(command)}")
    with Machine(kernel.image(), Job(command, wire.BOTH, folder=ROOT), tally) as machine:
        return machine.wait(GUEST_SECONDS)


def two(tally: Tally, only: Sequence[str]) -> int:
    """The tests in ``two``, in the first of two machines; they end with it."""
    return _in_two(tally, *(only or ("tests/rdma/two",)))


def slow(tally: Tally, only: Sequence[str]) -> int:
    """What takes long, of all parts. Of the guest's tests, those where every operation is held back."""
    if only:
        return _in_two(tally, *only, "-m", "slow")
    statuses = (
        _in_harness(tally, "tests/rdma/test_harness.py", "-m", "slow"),
        _in_guest(tally, "tests/rdma/guest", *SUITE, f"{DEVICE}+delays", "-k", DELAYED),
        _in_two(tally, "tests/rdma/two", "-m", "slow"),
    )
    return max(statuses)


def _in_two(tally: Tally, *arguments: str) -> int:
    tests = [*PYTEST, "-s", *arguments]
    agent = [sys.executable, "-m", "tests.rdma.two.agent"]
    say(f"two guests on one cable: {' '.join(tests)}, and {' '.join(agent)}")
    jobs = [
        Job(command, wire.one_of_two(number), name=f"vm{number + 1}", folder=ROOT, cpus=1)
        for number, command in enumerate((tests, agent))
    ]

    def line(name: str, text: str) -> None:
        tally("out", f"{name} | {text}\n".encode())

    with pair.started(kernel.image(), jobs, line) as machines:
        return machines[0].wait(GUEST_SECONDS)


def harness(tally: Tally, only: Sequence[str]) -> int:
    """Tests of the harness itself."""
    return _in_harness(tally, *(only or ("tests/rdma/test_harness.py",)))


def _in_harness(tally: Tally, *arguments: str) -> int:
    command = [*PYTEST, *arguments]
    say(f"the harness itself: {' '.join(command)}")
    # setpriv: it ends with us, however we end.
    with subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                tally("out", line)
        except BaseException:
            process.kill()
            raise
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
                        self.summary = line.decode(errors="replace").rpartition("|")[2].strip("= ")
