"""``bench faults``: how soon a waiter learns that its peer was killed or stopped."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorwire.bench.compare import Samples, Settings, Workload, records
from tensorwire.bench.programs import OURS, Contender, Stage, actor, pair
from tensorwire.bench.records import Record, Target, size_text
from tensorwire.bench.show import Notes

if TYPE_CHECKING:
    from tensorwire.bench.suite import Options

HEARTBEAT, LOST_AFTER = 0.1, 1.0  # seconds, of the rows in which the peer is stopped
_CHILDREN = 2


@dataclass(frozen=True)
class Fault:
    """What happens to the victim: killed with so much memory and so many children, or stopped."""

    device: str
    mib: int
    children: int
    number: signal.Signals = signal.SIGKILL

    @property
    def title(self) -> str:
        """The row's name."""
        if self.number == signal.SIGSTOP:
            return f"{self.device}, stopped, heartbeat {HEARTBEAT:g} s, lost after {LOST_AFTER:g} s"
        size = f"victim of {size_text(self.mib << 20)}" if self.mib else "small victim"
        return f"{self.device}, {size}" + (f", {self.children} forked children live on" if self.children else "")

    @property
    def target(self) -> Target:
        """The aim, for the slowest round."""
        if self.number == signal.SIGSTOP:
            return Target(LOST_AFTER + 2 * HEARTBEAT, worst=True)
        # The kernel frees a victim's memory before it closes its sockets.
        return Target(5e-3 if self.device == "shm" else 0.1 * (1 + self.mib / 1024), worst=True)


def faults(devices: Sequence[str], *, quick: bool) -> list[Fault]:
    """The rows of the table."""
    sizes = (0, 64) if quick else (0, 1024)
    killed = [Fault(d, mib, children) for d in devices for mib in sizes for children in (0, _CHILDREN)]
    return killed + [Fault(d, 0, 0, signal.SIGSTOP) for d in devices]


def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """``settings.rounds`` victims a row, the rows in turns."""
    samples = {fault: Samples() for fault in faults(options.devices, quick=options.quick)}
    for round in range(settings.rounds):
        for fault, measured in samples.items():
            notes.progress(f"{fault.title}: round {round + 1} of {settings.rounds}")
            measured.seconds.append(_lose(fault, settings))
    made: list[Record] = []
    for fault, measured in samples.items():
        mode = "stopped" if fault.number == signal.SIGSTOP else "killed"
        workload = Workload("faults", fault.device, fault.title, 0, mode, (), target=fault.target)
        made += records(workload, {OURS: measured})
    return made


def _lose(fault: Fault, settings: Settings) -> float:
    beats = (HEARTBEAT, LOST_AFTER) if fault.number == signal.SIGSTOP else (1.0, 10.0)
    contender = Contender(OURS, pair(actor("fault"), fault.device, fault.mib, fault.children, *beats))
    with Stage(contender, settings.cores) as stage:
        victim, waiter = stage.programs
        stage.run(0, 1)
        until_asleep(waiter.process.pid)
        start = time.monotonic()
        os.kill(victim.process.pid, fault.number)
        return float(json.loads(waiter.receive())["seconds"]) - start


def until_asleep(pid: int) -> None:
    """Returns when the main thread of a process sleeps in the kernel: here, in its wait."""
    while True:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] in "SZ":  # ended: its next answer will tell why
                return
        time.sleep(0.001)
