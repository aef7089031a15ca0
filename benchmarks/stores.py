"""``python -m benchmarks store``: the steps of ``tensorwire bench store`` beside a store on gRPC, or over a link.

That store has the same plan, rule, processes and cores. On a link, push and pull are measured beside iperf3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks import links
from benchmarks.libraries import GRPC, Libraries
from benchmarks.links import Places
from benchmarks.options import Options
from tensorwire.bench import programs, stores
from tensorwire.bench.compare import Settings, Workload, compare_all
from tensorwire.bench.programs import OURS, actor
from tensorwire.bench.records import Record, Target
from tensorwire.bench.show import Notes
from tensorwire.bench.stores import MIB, RULES, StoreJob
from tensorwire.bench.suite import update
from tensorwire.models import Model, find

LARGE = 64 * MIB  # bytes of a model, from which on tcp has a target
_ONE_WAY = 0.95
# Of FCN-5 with two workers over shm: the least ratio to gRPC's time.
_SHM = {"exchange-copied": 15.0, "exchange-mapped": 50.0, "step-copied": 6.0, "step-mapped": 8.0}
_TCP = 3.0


def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """Each model, on this machine or over each link."""
    if not options.links:
        libraries = Libraries(options.peer_python, notes)
        return update(options, settings, notes, lambda job, devices: workloads(job, devices, libraries))
    long = replace(settings, seconds=0.02 if options.quick else 3.0)
    made = [find(name) for name in options.workloads]
    return links.over_each(
        options.links, notes, lambda *link: [r for m in made for r in compare_all(over_link(m, *link), long, notes)]
    )


def workloads(job: StoreJob, devices: Sequence[str], libraries: Libraries) -> list[Workload]:
    """The package's own, each with the store on gRPC."""
    made = []
    program = libraries.program(GRPC)
    for workload in stores.workloads(job, devices):
        (ours,) = workload.contenders
        rule = next(rule for rule, kind in RULES.items() if workload.mode.startswith(kind))
        words, environment = (job.model.name, rule), GRPC.environment
        theirs = programs.job(
            "grpc", program, *words, workers=job.workers, servers=job.servers, environment=environment
        )
        others = [replace(theirs, word=ours.word, stopped=True)] if program else []
        target = _target(job, workload)
        made.append(replace(workload, contenders=(ours, *others), limits=("grpc",), target=target))
    return made


def _target(job: StoreJob, workload: Workload) -> Target | None:
    if workload.device == "tcp":
        return Target(shares={"grpc": _TCP}) if workload.nbytes >= LARGE else None
    if job.model.name != "fcn5" or job.workers != 2:
        return None
    return Target(shares={"grpc": _SHM[workload.mode]})


def over_link(model: Model, rate: str, places: Places) -> list[Workload]:
    """A worker at one end of a cable, server and another worker at the other; against iperf3, one way.

    The other worker decides when the store answers, and so lets the push and the pull be on the cable one at a time.
    """
    ours = programs.job(OURS, actor("store"), model.name, "none", "auto", workers=2, places=places)
    title = f"tcp store over a link of {rate}, {model.title} ({model.nbytes / MIB:.1f} MiB)"
    made = []
    for mode, word, share in (
        ("push", "push", _ONE_WAY),
        ("pull", "pull", _ONE_WAY),
        ("push-and-pull", "born", links.BOTH_WAYS[rate]),
    ):
        contenders = (replace(ours, word=word), *links.iperf(places, model.nbytes, both_ways=word == "born"))
        target = Target(shares={"iperf3": share})
        made.append(Workload("store", "tcp", title, model.nbytes, mode, contenders, ("iperf3",), target))
    return made
