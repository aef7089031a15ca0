"""``python -m benchmarks device``: the writes of ``tensorwire bench device``, beside libfabric and other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks import links, verbs
from benchmarks.libraries import Libraries
from benchmarks.options import Options
from tensorwire.bench import writes
from tensorwire.bench.compare import Settings, Workload, compare_all
from tensorwire.bench.limits import Limits
from tensorwire.bench.programs import Contender
from tensorwire.bench.records import Record, Target, size_text
from tensorwire.bench.show import Notes


def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """Over links, or on this machine, or between two."""
    if options.links:
        rounds = min(settings.rounds, 3)
        long = replace(settings, rounds=rounds, seconds=0.3 if options.quick else 3.0)
        return links.over_each(options.links, notes, lambda *link: compare_all(links.workloads(*link), long, notes))
    others = [device for device in options.devices if device != "verbs"]
    limits, libraries = Limits(notes), Libraries(options.peer_python, notes)
    own = writes.workloads(others, options.sizes, limits, quick=options.quick)
    records = compare_all(beside(own, libraries, options.peers), settings, notes)
    if "verbs" in options.devices:
        made = verbs.workloads(options.sizes, verbs.Ends(options.connect), notes, quick=options.quick)
        # perftest begins and ends within its figure, too: what that costs is to be little.
        records += compare_all(made, replace(settings, seconds=0.1 if options.quick else 1.0), notes)
    return records


def beside(own: Sequence[Workload], libraries: Libraries, names: Sequence[str]) -> list[Workload]:
    """The package's own, each with those of ``names`` that can do the same."""
    made: list[Workload] = []
    for workload in own:
        others = libraries.contenders(names, workload.device, workload.nbytes)
        if workload.mode == "ping-pong":  # theirs is one way with an acknowledgement
            made += [workload, *_acknowledged(workload, others)]
        elif workload.mode == "waiting-target":
            made.append(_beside_libfabric(workload, [*libraries.libfabric(workload.nbytes), *others]))
        else:
            others = others if workload.device == "shm" else []
            made.append(replace(workload, contenders=(*workload.contenders, *others)))
    return made


def _acknowledged(workload: Workload, others: Sequence[Contender]) -> list[Workload]:
    if not others:
        return []
    device, nbytes = workload.device, workload.nbytes
    title = f"{device} write, {size_text(nbytes)}, beside peers"
    contenders = (writes.ours(device, nbytes, "passive-target", asleep=True), *others)
    return [Workload("device", device, title, nbytes, "passive-target", contenders)]


def _beside_libfabric(workload: Workload, others: Sequence[Contender]) -> Workload:
    """It polls. A small write is held against it alone, a large one against blocking sockets as well."""
    workload = replace(workload, contenders=(*workload.contenders, *others))
    if workload.nbytes <= writes.SMALL:
        return replace(workload, limits=("libfabric", *workload.limits), target=Target(shares={"libfabric": 1.0}))
    if workload.target is None:
        return workload
    return replace(workload, target=Target(shares={**workload.target.shares, "libfabric": 1.0}))
