"""``bench store --part unequal``: one of two workers is stopped two thirds of the time; samples per second by mode."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tensorwire.bench.compare import Samples, Settings, Workload, records
from tensorwire.bench.models import find
from tensorwire.bench.programs import OURS, Answer, Contender, Program, Stage, actor
from tensorwire.bench.records import Record, Target
from tensorwire.bench.show import Notes

COMPUTE = 20.0  # milliseconds of a processor that a step takes
SAMPLES = 64  # of a step
RUNS, STOPPED = 0.01, 0.02  # seconds that the slow worker runs, and is then stopped
SHARE = 0.9
FAST, SLOW, BOTH = "fast worker alone", "slow worker alone", "both, each alone"
SYNC, SSP = f"{OURS}, sync", f"{OURS}, ssp"
_MODES = {FAST: "decoupled", SLOW: "decoupled", OURS: "decoupled", SSP: "ssp", SYNC: "sync"}


def measure(names: Sequence[str], devices: Sequence[str], settings: Settings, notes: Notes) -> list[Record]:
    """Every model over every device."""
    return [record for name in names for device in devices for record in _compare(name, device, settings, notes)]


def _compare(name: str, device: str, settings: Settings, notes: Notes) -> list[Record]:
    model = find(name)
    title = f"{device}, {model.title}, {COMPUTE:g} ms of computation, one of 2 workers slowed to a third, decoupled"
    samples = {who: Samples() for who in (OURS, SSP, SYNC, FAST, SLOW, BOTH)}
    with contextlib.ExitStack() as stack:
        stages = {who: stack.enter_context(Stage(_contender(who, name, device), settings.cores)) for who in _MODES}
        for number in range(settings.rounds):
            names = list(stages)
            at = number % len(names)
            for who in names[at:] + names[:at]:
                notes.progress(f"{title}: round {number + 1} of {settings.rounds}: {who}")
                samples[who].seconds.append(1 / _speed(stages[who], who, settings.seconds))
            both = sum(1 / samples[who].seconds[-1] for who in (FAST, SLOW))
            samples[BOTH].seconds.append(1 / both)
    shape = Workload("store", device, title, 0, "sample", (), (BOTH,), Target(shares={BOTH: SHARE}))
    return [_detailed(record) for record in records(shape, samples, {who: who for who in samples})]


def _contender(who: str, name: str, device: str) -> Contender:
    workers = 1 if who in (FAST, SLOW) else 2
    arguments = (name, _MODES[who], COMPUTE, "busy", workers, 1, device, "127.0.0.1")
    commands = [actor("paced", "server", 0, *arguments)]
    commands += [actor("paced", "worker", i, *arguments) for i in reversed(range(workers))]
    return Contender(who, tuple(commands), servers=1, environment={"TENSORWIRE_SECRET": secrets.token_hex(32)})


def _speed(stage: Stage, who: str, seconds: float) -> float:
    """Samples per second of all workers; the last of two is slow, or the only one."""
    slow = [] if who == FAST else [stage.programs[1]]
    with _slowed(slow):
        if who in (SYNC, SSP):  # those who wait for each other take the same number of steps
            step = COMPUTE / 1e3 * (RUNS + STOPPED) / RUNS
            answers = stage.run(1, max(2, int(seconds / step)))
        else:
            answers = stage.run(1, max(1, int(seconds * 1e3)), "timed")
    return _sum(answers[1:], together=who in (SYNC, SSP))


def _sum(answers: Sequence[Answer], *, together: bool) -> float:
    last = max(a["seconds"] for a in answers)
    return SAMPLES * sum(a["steps"] / (last if together else a["seconds"]) for a in answers)


@contextlib.contextmanager
def _slowed(programs: Sequence[Program]) -> Iterator[None]:
    """Inside it the programs are stopped two thirds of the time."""
    over = threading.Event()

    def slow() -> None:
        while not over.wait(RUNS):
            _signal(programs, signal.SIGSTOP)
            over.wait(STOPPED)
            _signal(programs, signal.SIGCONT)

    thread = threading.Thread(target=slow, name="slows a worker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _signal(programs, signal.SIGCONT)


def _signal(programs: Sequence[Program], number: signal.Signals) -> None:
    for program in programs:
        with contextlib.suppress(ProcessLookupError):
            os.kill(program.process.pid, number)


def _detailed(record: Record) -> Record:
    return replace(record, details={"samples_per_second": 1 / record.seconds})
