"""Long commands say what they do, on a terminal and elsewhere, before anything slow; Ctrl-C ends them with one line."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.progress import progress
from tests.harness.sandbox import Program, Sandbox

# A PyTorch that is imported forever, or until a file is there, and then turns out to be missing.
SLOW_TORCH = """
import os, time
while not os.path.exists({flag!r}): time.sleep(0.01)
raise ImportError("no PyTorch")
"""


@pytest.fixture
def flag(sandbox: Sandbox) -> Path:
    """The file that lets the import of PyTorch go on."""
    file = sandbox.folder / "flag"
    (sandbox.folder / "torch.py").write_text(SLOW_TORCH.format(flag=str(file)))
    sandbox.environment["PYTHONPATH"] = str(sandbox.folder)
    return file


def until_it_says(program: Program, words: str) -> None:
    """Returns once the words are on its standard error."""
    while words not in program._errors.read_text():
        assert program.process.poll() is None, program._errors.read_text()


def test_a_plan_says_what_it_loads(sandbox: Sandbox, flag: Path) -> None:
    program = sandbox.launch("plan", "vgg16")
    until_it_says(program, "tensorwire: loading PyTorch ...\n")
    flag.touch()
    result = program.finish()
    assert (result.status, result.out.strip()) == (2, "")
    assert result.one_line().startswith("tensorwire: tensorwire plan needs PyTorch: run pip install")


def test_on_a_terminal_it_says_so_at_once(sandbox: Sandbox, flag: Path) -> None:
    """On standard error alone: what is printed may go to a file."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tensorwire.cli", "plan", "vgg16"]
    environment = {**sandbox.environment, "COLUMNS": "100", "TERM": "xterm"}
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, text=True
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
            if b"loading PyTorch" in shown:
                flag.touch()
    except OSError:  # how a terminal ends
        pass
    finally:
        os.close(ours)
        out, _ = child.communicate()
    assert child.returncode == 2
    assert out == ""
    assert b"loading PyTorch" in shown
    assert b"loading PyTorch ..." not in shown, "that is the line for where there is no terminal"
    assert b"plan needs PyTorch" in shown


@pytest.mark.usefixtures("flag")
def test_an_interrupt_is_one_line(sandbox: Sandbox) -> None:
    program = sandbox.launch("plan", "vgg16")
    until_it_says(program, "loading PyTorch")
    program.signal(signal.SIGINT)
    result = program.finish()
    assert (result.status, result.out.strip()) == (130, "")
    assert result.one_line() == "tensorwire: interrupted"
    sandbox.nothing_left()


@pytest.mark.slow
def test_an_interrupted_trace_is_one_line(sandbox: Sandbox) -> None:
    """In the user's own script, below layers of PyTorch."""
    model = sandbox.folder / "model.py"
    model.write_text(
        "import time, torch\n"
        "class Slow(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        print('tracing', flush=True)\n"
        "        while True: time.sleep(0.01)\n"
        "def model(): return Slow(8, 8)\n"
        "def inputs(): return (torch.zeros(2, 8),)\n"
    )
    program = sandbox.launch("plan", str(model))
    program.expect("tracing")
    program.signal(signal.SIGINT)
    result = program.finish()
    assert (result.status, result.one_line()) == (130, "tensorwire: interrupted")


def test_a_line_for_each_step_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorwire.progress.PATIENCE", 0.001)
    # A pipe, because capturing with pytest may lose what a thread writes while another one reads.
    ours, theirs = os.pipe()
    with open(ours) as said:
        with open(theirs, "w") as stderr:
            monkeypatch.setattr("sys.stderr", stderr)
            with progress("the first") as report:
                assert said.readline() == "tensorwire: the first ...\n"
                report("the second")
                assert said.readline() == "tensorwire: the second ...\n"
        assert said.read() == ""


def test_a_quick_command_prints_no_progress(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tensorwire.progress.PATIENCE", 1e6)
    with pytest.raises(ZeroDivisionError), progress("a division"):
        _ = 1 / 0
    assert capfd.readouterr().err == ""
