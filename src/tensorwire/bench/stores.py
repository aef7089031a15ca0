"""``bench store``: steps of the parameter store.

Where the payload ends up in mapped memory and was born there, no byte moves; the mode says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tensorwire.bench import programs
from tensorwire.bench.compare import Workload
from tensorwire.bench.programs import OURS
from tensorwire.models import Model
from tensorwire.sizes import counted

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
        counts = counted(self.workers, "worker"), counted(self.servers, "server")
        return f"{self.model.title} ({self.model.nbytes / MIB:.1f} MiB), {', '.join(counts)}"


def workloads(job: StoreJob, devices: Sequence[str]) -> list[Workload]:
    """Whole steps, then push and pull without update; gradients copied, then born in their slots."""
    made = []
    for device in devices:
        for rule in RULES:
            program, words = programs.actor("store"), (job.model.name, rule, device)
            ours = programs.job(OURS, program, *words, workers=job.workers, servers=job.servers)
            for word in ("copied", "born"):
                mode = f"{RULES[rule]}-{'mapped' if (device, word) == ('shm', 'born') else word}"
                title = f"{device} store, {job.title}" + (", SGD with momentum" if rule == "SGD" else "")
                made.append(Workload("store", device, title, job.model.nbytes, mode, (replace(ours, word=word),)))
    return made
