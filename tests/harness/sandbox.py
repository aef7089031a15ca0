"""Runs programs for tests, knows every process they start, and sees what they leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tensorwire.testing.patience import patient

MARK = "TENSORWIRE_TEST_MARK"
# A member that waits for something that never comes, and so leaves as soon as the job has ended.
WAITS = "job._worker.member.client.lookup('nothing', 600.0)"
# What `tensorwire run` puts before the lines of a process.
NAMES = re.compile(r"^(worker|server) \d+ +\| ", re.M)
# What a command says after two seconds, and a worker that waits after some more, of which a busy machine has many.
PROGRESS = re.compile(
    r"^(tensorwire: .* \.\.\.|worker \d+ has waited .*|(no coordinator|cannot find|rank 0 has not) .* s for it)\n", re.M
)
# What worker 0 says once, where something is published.
PUBLISHED = re.compile(r"^tensorwire: job \w+ publishes its weights: tensorwire ls \w+\n", re.M)
HANG_SECONDS = patient(200.0)  # only a guard: nothing here is ever timed
# What a launcher or a user may have set for the tests themselves; readline sets the size of a terminal that it has not,
# which the processes that pytest-xdist starts inherit.
_FOREIGN = (
    "PYTHON",
    "TENSORWIRE_",
    "SLURM_",
    "TORCHELASTIC_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "COLUMNS",
    "LINES",
)


@dataclass
class Result:
    """How a program ended. ``out`` and ``err`` without the names before lines; ``raw``: ``out`` with them."""

    status: int
    out: str
    err: str
    raw: str = ""

    def one_line(self) -> str:
        """Its message, which is one line."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]

    def message(self) -> str:
        """All of its one message, which may end with a traceback or a diff."""
        assert self.err.startswith("tensorwire: "), self.err
        assert sum(line.startswith("tensorwire: ") for line in self.err.splitlines()) == 1, self.err
        return self.err


class Program:
    """A running program; its output comes line by line."""

    def __init__(self, argv: list[str], environment: Mapping[str, str], errors: Path) -> None:
        self._errors = errors
        with errors.open("wb") as file:
            self.process = subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, text=True
            )
        self.lines: list[str] = []

    def expect(self, *wanted: str) -> None:
        """Reads until each of the lines was seen."""
        assert self.process.stdout is not None
        while not set(wanted) <= set(self.lines):
            line = self.process.stdout.readline()
            assert line, f"ended before {wanted}: {self.lines} {self._errors.read_text()}"
            self.lines.append(NAMES.sub("", line.strip()))

    def number(self, word: str) -> int:
        """Reads until a line ``word N``; returns N."""
        return int(self.said(word))

    def said(self, word: str) -> str:
        """Reads until a line ``word ...``; returns its last word."""
        return self.line(word + " ").split()[-1]

    def line(self, beginning: str) -> str:
        """Reads until a line that begins so."""
        assert self.process.stdout is not None
        while True:
            for line in self.lines:
                if line.startswith(beginning):
                    return line
            line = self.process.stdout.readline()
            assert line, f"ended before {beginning!r}: {self.lines} {self._errors.read_text()}"
            self.lines.append(NAMES.sub("", line.strip()))

    def signal(self, number: int) -> None:
        """Sends a signal to the program itself."""
        self.process.send_signal(number)

    def finish(self) -> Result:
        """Waits for its end."""
        out, _ = self.process.communicate(timeout=HANG_SECONDS)
        text = "\n".join([*self.lines, NAMES.sub("", out)])
        errors = PROGRESS.sub("", NAMES.sub("", self._errors.read_text()))
        return Result(self.process.returncode, text, errors, out)


class Sandbox:
    """One test's programs, scripts and runtime folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self.runtime = folder / "runtime"
        self.runtime.mkdir(mode=0o700)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        self.environment |= {
            MARK: self.mark,
            "XDG_RUNTIME_DIR": str(self.runtime),
            "PET_LOG_DIR": str(folder / "torchrun"),  # else torchrun leaves folders in /tmp
            "TENSORWIRE_GRACE": str(patient(0.7)),
            "TENSORWIRE_FAILURE_TIMEOUT": str(patient(10.0)),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self._programs: list[Program] = []

    def script(self, body: str, *, init: bool = True) -> str:
        """A file of Python, by default one that begins with ``job = tw.init()``."""
        # A line is one write, so that lines of several processes do not mix.
        head = "import os, signal, sys, time\n"
        head += "def print(*words, **_): os.write(1, (' '.join(map(str, words)) + '\\n').encode())\n"
        if init:
            head += "import tensorwire as tw\njob = tw.init()\nprint(f'pid-{job.rank} {os.getpid()}')\n"
        path = self.folder / f"script{len(list(self.folder.glob('script*')))}.py"
        path.write_text(head + textwrap.dedent(body))
        return str(path)

    def secret(self, text: str = "0123456789abcdef") -> str:
        """A file with a job's secret."""
        path = self.folder / f"secret-{text[:4]}"
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    def start(self, *argv: str, **environment: str) -> Program:
        """Starts a program; ``environment`` is added to the sandbox's own."""
        errors = self.folder / f"stderr{len(self._programs)}"
        program = Program(list(argv), {**self.environment, **environment}, errors)
        self._programs.append(program)
        return program

    def python(self, script: str, *arguments: str, **environment: str) -> Program:
        """``python script``."""
        return self.start(sys.executable, script, *arguments, **environment)

    def launch(self, *arguments: str, **environment: str) -> Program:
        """``tensorwire arguments``."""
        return self.start(sys.executable, "-m", "tensorwire.cli", *arguments, **environment)

    def run(self, script: str, *options: str, workers: int = 2, **environment: str) -> Program:
        """``tensorwire run --workers N options -- python script``."""
        return self.start(*run_command(script, *options, workers=workers), **environment)

    def processes(self) -> dict[int, str]:
        """Every living process that a program of this test started, however indirectly: pid -> command line."""
        found = {}
        mark = f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def find(self, words: str) -> int:
        """The one process whose command line has ``words``."""
        (pid,) = [pid for pid, command in self.processes().items() if words in command]
        return pid

    def all_gone(self) -> None:
        """Waits until no process is left."""
        while left := self.processes():
            for pid in left:
                wait_for_end(pid, left[pid])

    def nothing_left(self) -> None:
        """No process and no file is there any more: at once after an orderly end."""
        assert self.processes() == {}
        assert [p for p in self.runtime.rglob("*") if p.is_file()] == []

    def close(self) -> None:
        """Ends what a failed test may have left."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                wait_for_end(pid, left[pid])
        for program in self._programs:
            program.process.communicate()


def run_command(script: str, *options: str, workers: int = 2) -> list[str]:
    """The words of ``tensorwire run --workers N options -- python script``."""
    run = [sys.executable, "-m", "tensorwire.cli", "run", "--workers", str(workers), *options]
    return [*run, "--", sys.executable, script]


def wait_for_end(pid: int, what: str = "") -> None:
    """Waits for the end of any process."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], HANG_SECONDS)[0], f"process {pid} lives on: {what}"
    finally:
        os.close(fd)


def free_port() -> int:
    """A port where nobody listens now, outside the range that the kernel gives to others."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = 2000 + secrets.randbelow(low - 2000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """This process has the same threads and descriptors after as before."""
    import gc
    import threading

    gc.collect()  # what the tests before left must not go away in between
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive(), thread
    left = _descriptors()
    changed = sorted(left.items() ^ descriptors.items())
    assert not changed, changed


def _descriptors() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[entry.name] = str(entry.readlink())
    return {fd: what for fd, what in found.items() if not what.startswith("/proc/")}


def every(calls: list[Callable[[], object]]) -> list[BaseException | object]:
    """Calls all of them at once, each in its thread; their results or errors."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        futures = [pool.submit(call) for call in calls]
        return [f.exception(HANG_SECONDS) or f.result() for f in futures]
