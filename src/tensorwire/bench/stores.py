"""``bench store``: steps of the parameter store, and on a link its push and pull beside iperf3.

Where the payload ends up in mapped memory and was born there, no byte moves; the mode says so.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tensorwire.bench import links
from tensorwire.bench.compare import Workload
from tensorwire.bench.models import Model, find
from tensorwire.bench.programs import OURS, Contender, actor
from tensorwire.bench.records import Target

MIB = 2**20
RULES = {"SGD": "step", "none": "exchange"}  # and the first half of the mode
_ONE_WAY = 0.95


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
    arguments = (job.model.name, rule, job.workers, job.servers, device, "127.0.0.1")
    servers = [actor("store", "server", i, *arguments) for i in range(job.servers)]
    workers = [actor("store", "worker", i, *arguments) for i in reversed(range(job.workers))]
    secret = {"TENSORWIRE_SECRET": secrets.token_hex(32)}
    return Contender(OURS, (*servers, *workers), servers=job.servers, environment=secret)


def over_link(model: Model, rate: str, names: tuple[str, str]) -> list[Workload]:
    """A worker at one end of a cable, server and another worker at the other; against iperf3, one way.

    The other worker decides when the store answers, and so lets the push and the pull be on the cable one at a time.
    """
    here, there = (links.inside(name) for name in names)
    arguments = (model.name, "none", 2, 1, "auto")
    commands = (
        (*here, *actor("store", "server", 0, *arguments, links.ADDRESSES[0])),
        (*here, *actor("store", "worker", 1, *arguments, links.ADDRESSES[0])),
        (*there, *actor("store", "worker", 0, *arguments, links.ADDRESSES[1])),
    )
    secret = {"TENSORWIRE_SECRET": secrets.token_hex(32)}
    made = []
    for mode, word, share in (
        ("push", "push", _ONE_WAY),
        ("pull", "pull", _ONE_WAY),
        ("push-and-pull", "born", links.BOTH_WAYS[rate]),
    ):
        ours = Contender(OURS, commands, word=word, servers=1, environment=secret)
        title = f"tcp store over a link of {rate}, {model.title} ({model.nbytes / MIB:.1f} MiB)"
        shares = Target(shares={"iperf3": share})
        theirs = links.iperf(names, model.nbytes, both_ways=word == "born")
        made.append(Workload("store", "tcp", title, model.nbytes, mode, (ours, *theirs), ("iperf3",), shares))
    return made
