"""What the gate keeps of its tests: how long each took, and which failed. ``python tests/gate.py FOLDER`` ends it.

Within the gate, pytest loads this as a plugin. It writes a file per run of pytest, and a run in which a few tests fail
passes for now. At the end each of these tests runs once more, alone. One that passes then is *unsteady*, and is shown.
More than ``MOST`` failed tests of all runs fail the gate. A skip for want of an environment that the gate makes fails
its run.

Uses only Python's own library: the last part runs in no environment.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pytest

FOLDER = "TENSORWIRE_GATE"  # where files are kept; without it the plugin does nothing
WITHOUT = "TENSORWIRE_GATE_WITHOUT"  # commands that the gate has left out, such as `make setup-mxnet`
MOST = 3  # unsteady tests of a gate that passes
SLOWEST = 20
ROOT = Path(__file__).resolve().parents[1]
FAILED = re.compile(r"^(?:vm1 \| )?(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", re.MULTILINE)


class Failed(NamedTuple):
    """A test that failed: how to run it alone, and what it said."""

    test: str
    command: list[str]
    output: str


# ---- in a run of pytest


class Recorder:
    """Notes what becomes of the tests of one run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.missing: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a phase of a test."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            sections = [f"---- {name}\n{text}" for name, text in report.sections]
            self.failed[report.nodeid] = "\n".join([report.longreprtext, *sections])
        elif report.skipped:
            self._skipped(report.nodeid, str(report.longrepr))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file may be skipped as a whole."""
        if report.skipped:
            self._skipped(report.nodeid, str(report.longrepr))

    def _skipped(self, test: str, why: str) -> None:
        wanted = re.search(r"make setup-\w+", why)
        if wanted and wanted[0] not in os.environ.get(WITHOUT, "").split(","):
            self.missing.append(f"{test}: {why}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the file. Few failures pass for now; nothing else that is wrong does."""
        folder = Path(os.environ[FOLDER])
        alone = [sys.executable, "-m", "pytest", "-rf", "-m", "", *(["-n0"] if _has_xdist(session) else [])]
        kept = {
            "seconds": self.seconds,
            "failed": [Failed(test, [*alone, test], output) for test, output in self.failed.items()],
        }
        (folder / f"{len(list(folder.glob('*.json'))):02}.json").write_text(json.dumps(kept))
        if self.missing:
            session.exitstatus = 1
        elif session.exitstatus == 1 and 0 < len(self.failed) <= MOST:
            session.exitstatus = 0

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Says which tests need an environment that should be there."""
        for line in self.missing:
            terminalreporter.write_line(f"the gate makes what this test lacks, but not before it: {line}")


def _has_xdist(session: pytest.Session) -> bool:
    return session.config.pluginmanager.hasplugin("xdist")


def pytest_configure(config: pytest.Config) -> None:
    """Notes what becomes of tests, where the gate wants it, and not in the processes that run some of them."""
    os.environ.pop("PYTEST_ADDOPTS", None)  # runs of pytest within tests are none of the gate's
    if FOLDER in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


# ---- at the end


def kept(folder: Path) -> Iterator[dict[str, Any]]:
    """What each run has left."""
    for path in sorted(folder.glob("*.json")):
        yield json.loads(path.read_text())


def in_guests(output: str) -> list[Failed]:
    """The tests that failed in the output of ``make test-rdma``."""
    found = []
    for test in FAILED.findall(output):
        part = "two" if "rdma/two/" in test else "harness" if "test_harness" in test else "guest"
        command = ["make", "test-rdma", f"ARGS={part} --only '{test}'"]
        found.append(Failed(test, command, "its output is that of make test-rdma, above"))
    return found


def show_slowest(seconds: Iterable[tuple[str, float]]) -> None:
    """Prints the tests that took longest."""
    print(f"the {SLOWEST} slowest tests, in seconds:")
    for test, taken in sorted(seconds, key=lambda item: -item[1])[:SLOWEST]:
        print(f"{taken:7.1f}  {test}")


def rerun(failed: Sequence[Failed]) -> int:
    """Runs each test that failed once more, alone, unless they are too many. The exit status: 1 if one fails again."""
    if len(failed) > MOST:  # whatever becomes of them: in guests, each would take a minute
        print(f"{len(failed)} tests failed, and a gate that passes has at most {MOST} that are unsteady")
        return 1
    unsteady, again = [], []
    environment = {name: value for name, value in os.environ.items() if name not in (FOLDER, "PYTEST_ADDOPTS")}
    for each in failed:
        print(f"once more, alone: {each.test}", flush=True)
        status = subprocess.run(each.command, cwd=ROOT, env=environment).returncode
        (again if status else unsteady).append(each)
    if unsteady:
        print("\nunsteady: these failed, and passed when they ran once more, alone.")
        for each in unsteady:
            print(f"\n== {each.test}\n{each.output}")
    for each in again:
        print(f"failed twice: {each.test}")
    return int(bool(again))


def main(folder: Path) -> int:
    """Shows the slowest tests, and runs those that failed once more."""
    runs = list(kept(folder))
    show_slowest(item for run in runs for item in run["seconds"].items())
    guests = folder / "guests.txt"
    failed = [Failed(*each) for run in runs for each in run["failed"]]
    return rerun([*failed, *(in_guests(guests.read_text()) if guests.exists() else [])])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
