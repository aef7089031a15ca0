"""Runs cases in a process of its own, whose torch has the simulated accelerator: tests ask how each went.

A case is a function of one of our modules whose name begins with ``case_``. One process runs all of them, because
starting torch takes longer than most cases.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tensorwire.testing.patience import patient
from tests.accelerator import simulated

ROOT = Path(__file__).parents[2]
SECONDS = patient(200.0)  # only a guard: nothing here is ever timed


def cases_of(module: str) -> dict[str, Callable[[], None]]:
    """The cases of a module of this folder. In a test module: skips it where the accelerator cannot be used."""
    if why := simulated.unavailable():
        pytest.skip(why, allow_module_level=True)
    found = vars(importlib.import_module(f"tests.accelerator.{module}"))
    return {name.removeprefix("case_"): value for name, value in found.items() if name.startswith("case_")}


class Results:
    """How the cases of some modules went, in a process that is over."""

    def __init__(self, modules: Sequence[str], file: Path) -> None:
        simulated.build()  # compiling has no limit of time
        words = [sys.executable, "-W", "error", "-m", "tests.accelerator.child", str(file), *modules]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
        self._end = f"status {done.returncode}\n{done.stdout}{done.stderr}"
        self._went: dict[str, str] = {}
        for line in file.read_text().splitlines() if file.exists() else []:
            self._went.update(json.loads(line))

    def check(self, module: str, case: str) -> None:
        """Fails with the case's traceback, or with the words of a process that ended before it."""
        case = f"{module}.{case}"
        assert case in self._went, f"the process ended before: {self._end}"
        assert self._went[case] == "", f"\n{self._went[case]}"


def main(file: str, *modules: str) -> None:
    """Runs all cases, and writes a line for each. If one hangs, it says where, and ends also without its parent."""
    faulthandler.dump_traceback_later(0.9 * SECONDS, exit=True)
    simulated.load()
    import torch

    torch.set_num_threads(1)  # as in the runs on the CPU that they are compared with
    with open(file, "w") as lines:
        for module in modules:
            for name, case in cases_of(module).items():
                lines.write(json.dumps({f"{module}.{name}": _run(case)}) + "\n")
                lines.flush()


def _run(case: Callable[[], None]) -> str:
    """Its traceback; empty if it went well. Whatever happened, the next one finds a quiet device."""
    simulated.schedule(0)
    before = simulated.registered()
    try:
        case()
        simulated.settle()
        assert simulated.registered() == before, "memory was left registered"
    except Exception:
        simulated.limit(None)
        while simulated.pending():
            try:
                simulated.settle()
            except RuntimeError:
                pass  # another kernel that failed
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
