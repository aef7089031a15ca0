"""The processes of one contender: started, pinned, introduced to each other, driven by lines, and always ended.

The conversation is described in ``actors/lines.py``; set-up and rounds pass here, payload never does.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorwire.bench.actors.lines import STOP
from tensorwire.control.names import describe_exit
from tensorwire.errors import TensorwireError
from tensorwire.launch import start
from tensorwire.launch.start import module_command

ACTORS = Path(__file__).parent / "actors"  # on the import path of programs that have nothing of ours
HANG_SECONDS = 600.0  # for one answer; only a guard: a round over a slow link takes minutes
OURS = "tensorwire"
Answer = dict[str, float]
Place = tuple[tuple[str, ...], str]
HERE: tuple[Place, ...] = (((), "127.0.0.1"),)


class ProgramFailed(TensorwireError):
    """A program of a benchmark ended or did not answer; the message has its last words."""


@dataclass(frozen=True)
class Contender:
    """Who takes part in a comparison: the commands of its programs, the target's first, the initiator's last.

    ``group``: what counts as one limit, by its best. ``asleep``: the target is to sleep while the initiator works.
    ``stopped``: its programs have threads that do not sleep, so they are stopped while others are measured.
    ``word``: what the programs are to do instead of their own work. Contenders with the same commands share one set of
    processes, and so the same memory. ``servers``: the first so many programs serve the others, which run together;
    all share the cores, and each is told the lines of all. Servers begin by themselves, and are asked afterwards.
    ``meanwhile``: so many after them are told the round, work until all others have answered, and answer then.
    ``memory``: bytes that its programs may take; 0: little. ``how``: for people, how it is run. ``together``: its
    programs share the cores, because they have several threads that need them at a time.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    group: str = ""
    asleep: bool = False
    stopped: bool = False
    word: str = ""
    servers: int = 0
    meanwhile: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    memory: int = 0
    how: str = ""
    together: bool = False


def actor(name: str, package: str = "tensorwire.bench.actors") -> tuple[str, ...]:
    """The command of one of Tensorwire's own programs, without its arguments."""
    return tuple(module_command(f"{package}.{name}"))


def pair(program: tuple[str, ...], *arguments: object) -> tuple[tuple[str, ...], ...]:
    """The commands of target and initiator of the same program."""
    return tuple((*program, role, *map(str, arguments)) for role in ("target", "initiator"))


def job(
    name: str,
    program: tuple[str, ...],
    *arguments: object,
    workers: int,
    servers: int = 1,
    places: Sequence[Place] = HERE,
    **options: Any,
) -> Contender:
    """Servers and workers of one job, each ``program ROLE INDEX ARGUMENTS... WORKERS SERVERS HOST``.

    A place is what a command there begins with, and its address. Where there are two, server 0 and worker 1 are at the
    first, and worker 0 is at the second.
    """

    def command(place: int, role: str, index: int) -> tuple[str, ...]:
        prefix, host = places[place % len(places)]
        return (*prefix, *program, role, *map(str, (index, *arguments, workers, servers, host)))

    commands = [command(i, "server", i) for i in range(servers)]
    commands += [command(i + 1, "worker", i) for i in reversed(range(workers))]
    options["environment"] = {"TENSORWIRE_SECRET": secrets.token_hex(32), **options.get("environment", {})}
    return Contender(name, tuple(commands), servers=servers, **options)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM back: a process must not be started or ended by half."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


_running: set[Program] = set()


def end_all() -> None:
    """Ends every program that still runs: an interrupt may come where nobody has it in hand yet."""
    for program in list(_running):
        program.close()


class Program:
    """One process and the two pipes to it; on ``cores`` alone, if any are given. Errors call it ``name``."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], cores: Sequence[int] = (), name: str = ""
    ) -> None:
        self._name = name or " ".join(Path(word).name for word in command if word not in ("-m", start.__file__))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the program
        self._read = b""
        with uninterrupted():
            try:
                # A session of its own: Ctrl-C is for the benchmark, which then ends its programs.
                self.process = subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    start_new_session=True,
                )
            except OSError as error:
                self._errors.close()
                raise ProgramFailed(f"{self._name} cannot be started: {error.strerror}") from None
            _running.add(self)
        if not cores:
            return
        with contextlib.suppress(OSError):  # it has ended already; the first answer will tell
            os.sched_setaffinity(self.process.pid, cores)

    def fileno(self) -> int:
        """For ``select``: readable when it has answered or ended."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, line: str) -> None:
        """Gives it a line."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; ``receive`` tells why
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def receive(self) -> str:
        """Its next line."""
        end = time.monotonic() + HANG_SECONDS
        while b"\n" not in self._read:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self], [], [], left)[0]:
                raise ProgramFailed(f"{self._name} did not answer within {HANG_SECONDS:g} s")
            data = os.read(self.fileno(), 65536)
            if not data:
                raise ProgramFailed(f"{self._name} {self._how_it_ended()}")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        """Ends it, with what it may have started. Idempotent."""
        with uninterrupted():
            if self not in _running:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout, self._errors):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            _running.discard(self)

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)  # it may have closed its output only
        status = self.process.returncode or 0
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip().splitlines() if status >= 0 else []
        return f"ended: {words[-1]}" if words else describe_exit(status)


def receive_all(programs: Sequence[Program], *, silent: Sequence[Program] = ()) -> list[str]:
    """The next line of each, in their order. Raises `ProgramFailed` as soon as one ends.

    ``silent`` ones have nothing to say meanwhile, unless they fail.
    """
    # One may have failed while the other waits for it: the first to speak or end is heard first.
    waiting = list(programs)
    heard: dict[Program, str] = {}
    while waiting:
        ready, _, _ = select.select([*waiting, *silent], [], [], HANG_SECONDS)
        for program in ready or list(waiting):
            heard[program] = program.receive()
            waiting.remove(program)
    return [heard[program] for program in programs]


def ask(programs: Sequence[Program], line: str, *, silent: Sequence[Program] = ()) -> list[Answer]:
    """Sends a line to all; returns their answers in order. Raises `ProgramFailed`. ``silent``: see `receive_all`."""
    for program in programs:
        program.send(line)
    return [json.loads(told) for told in receive_all(programs, silent=silent)]


class Stage:
    """A contender's programs, which run and end together. The initiator's answer is the last. A context manager.

    They are a ring, in which each is told the line of the next one; where there are servers, all are told all lines.

    Raises `ProgramFailed` where one of them does not start.
    """

    def __init__(self, contender: Contender, cores: Sequence[int]) -> None:
        self.contender = contender
        self.programs: list[Program] = []
        self.lines: list[str] = []
        self._rounds = 0
        environment = {"OMP_NUM_THREADS": "1", **contender.environment}
        try:
            for i, command in enumerate(contender.commands):
                # The target on the second core, the initiator on the first; more take turns.
                core = cores[(len(contender.commands) - 1 - i) % len(cores)]
                shared = contender.servers or contender.together
                self.programs.append(Program(command, environment, cores if shared else [core]))
            lines = self.lines = receive_all(self.programs)
            told = [" ".join(lines)] * len(lines) if contender.servers else [*lines[1:], lines[0]]
            for program, line in zip(self.programs, told, strict=True):
                program.send(line)
            receive_all(self.programs)
        except BaseException:
            self.close()
            raise

    def run(self, warm: int, count: int, word: str = "") -> list[Answer]:
        """One round; the answers in the order of the programs. Raises `ProgramFailed`."""
        self._rounds += 1  # each has bytes of its own
        line = f"run {self._rounds} {warm} {count} {word}".rstrip()
        self._signal(signal.SIGCONT)
        try:
            return self._ask(line)
        except ProgramFailed:
            self.close()  # the other one may be spinning
            raise
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for program in self.programs if self.contender.stopped else ():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.process.pid, number)

    def _ask(self, line: str) -> list[Answer]:
        if self.contender.asleep:
            return [ask([program], line)[0] for program in reversed(self.programs)][::-1]
        count, busy = self.contender.servers, self.contender.servers + self.contender.meanwhile
        servers, meanwhile, others = self.programs[:count], self.programs[count:busy], self.programs[busy:]
        for program in meanwhile:
            program.send(line)
        answers = ask(others, line, silent=[*servers, *meanwhile])
        answers = ask(meanwhile, STOP, silent=servers) + answers
        return ask(servers, line) + answers

    def close(self) -> None:
        """Ends all of them. Idempotent."""
        for program in self.programs:
            program.close()
        self.programs = []

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
