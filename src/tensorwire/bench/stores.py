"""``bench store``: steps of the parameter store.

Where the payload ends up in mapped memory and was born there, no byte moves; the mode says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tensorwire.bench import programs
from tensorwire.bench.compare import Workload
from tensorwire.bench.programs import OURS, Contender
from tensorwire.models import Model, find

MIB = 2**20
RULES = {"SGD": "step", "none": "exchange"}  # and the first half of the mode


@dataclass(frozen=True)
class StoreJob:
    """What is compared: a model, and by how many processes it is trained."""

    model: Model
    workers: int = 2
    servers: int = 1

    @property
    def title(self) -> str:
        """For people."""
        counts = f"{self.workers} worker{'s' * (self.workers > 1)}, {self.servers} server{'s' * (self.servers > 1)}"
        return f"{self.model.title} ({self.model.nbytes / MIB:.1f} MiB), {counts}"


def jobs(names: Sequence[str], workers: int, servers: int) -> list[StoreJob]:
    """One a model."""
    return [StoreJob(find(name), workers, servers) for name in names]


def workloads(job: StoreJob, devices: Sequence[str]) -> list[Workload]:
    """Whole steps, then push and pull without update; gradients copied, then born in their slots."""
    made = []
    for device in devices:
        for rule in RULES:
            ours = _ours(job, rule, device)
            for word in ("copied", "born"):
                mode = f"{RULES[rule]}-{'mapped' if (device, word) == ('shm', 'born') else word}"
                title = f"{device} store, {job.title}" + (", SGD with momentum" if rule == "SGD" else "")
                made.append(Workload("store", device, title, job.model.nbytes, mode, (replace(ours, word=word),)))
    return made


def _ours(job: StoreJob, rule: str, device: str) -> Contender:
    program, name = programs.actor("store"), job.model.name
    return programs.job(OURS, program, name, rule, device, workers=job.workers, servers=job.servers)
