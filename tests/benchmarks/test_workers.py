"""The processes of a variant to train: whoever dies while they start is named at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.workers import Setup, Variant, Workers
from tensorwire.bench import programs
from tensorwire.bench.programs import Program, ProgramFailed, receive_all
from tests.harness.sandbox import nothing_kept

# Python runs this before the program; the victim is found by the words of its command line.
KILLS = """
import os, signal, sys
if {words!r} in " ".join(sys.orig_argv) and os.environ.get("TENSORWIRE_INDEX", "1") == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""
ENDS = "import sys; sys.exit({status})"
SAYS = "import sys; input(); sys.exit('ValueError: the cause')"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Nothing is left, and what hangs is told in the words of a hang instead of the test's timeout."""
    with nothing_kept():
        yield
    assert not programs._running


@pytest.mark.parametrize(
    ("kind", "words", "victim"),
    [
        ("store", "tensorwire.launch.server_process", "server 1"),
        ("store", "actors.train store fcn5 64 1 2", "worker 1"),
        ("ddp", "actors.train ddp fcn5 64 1 2", "worker 1"),
    ],
)
def test_who_dies_at_the_start_is_named(
    kind: str, words: str, victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(KILLS.format(words=words))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ProgramFailed, match=f"^mine: {victim} was killed by SIGKILL$"):
        Workers(Variant("mine", kind), Setup("fcn5", workers=2, servers=2, shrink=64))


def start(stack: ExitStack, name: str, code: str) -> Program:
    """A program of a few lines, ended with ``stack``."""
    program = Program((sys.executable, "-I", "-c", code), {}, name=name)
    stack.callback(program.close)
    return program


def test_a_server_that_left_with_its_job_is_not_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        server, worker = start(stack, "server 0", ENDS.format(status=1)), start(stack, "worker 0", SAYS)
        left = server.left

        def seen() -> bool:
            worker.send("now")  # whose end comes second
            return left()

        monkeypatch.setattr(server, "left", seen)
        with pytest.raises(ProgramFailed, match=r"^worker 0 ended: ValueError: the cause$"):
            receive_all([worker], silent=[server])


@pytest.mark.parametrize(
    ("status", "told"),
    [("'no room'", "ended: no room"), ("3", "exited with status 3")],
)
def test_a_server_that_failed_is(status: str, told: str) -> None:
    with ExitStack() as stack:
        server, worker = start(stack, "server 0", ENDS.format(status=status)), start(stack, "worker 0", "input()")
        with pytest.raises(ProgramFailed, match=f"^server 0 {told}$"):
            receive_all([worker], silent=[server])
