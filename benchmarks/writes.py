"""``python -m benchmarks device``: the writes of ``tensorwire bench device``, beside libfabric and other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.libraries import Libraries
from tensorwire.bench import writes
from tensorwire.bench.compare import Workload
from tensorwire.bench.limits import Limits
from tensorwire.bench.programs import Contender
from tensorwire.bench.records import Target, size_text


def workloads(
    devices: Sequence[str],
    sizes: Sequence[int],
    limits: Limits,
    libraries: Libraries,
    names: Sequence[str],
    *,
    quick: bool,
) -> list[Workload]:
    """The package's own, each with those of ``names`` that can do the same."""
    made: list[Workload] = []
    for workload in writes.workloads(devices, sizes, limits, quick=quick):
        others = libraries.contenders(names, workload.device, workload.nbytes)
        if workload.mode == "ping-pong":  # theirs is one way with an acknowledgement
            made += [workload, *_acknowledged(workload, others)]
        elif workload.mode == "waiting-target":
            made.append(_beside_libfabric(workload, [*libraries.libfabric(workload.nbytes), *others]))
        else:
            made.append(_with(workload, others) if workload.device == "shm" else workload)
    return made


def _with(workload: Workload, others: Sequence[Contender]) -> Workload:
    return replace(workload, contenders=(*workload.contenders, *others))


def _acknowledged(workload: Workload, others: Sequence[Contender]) -> list[Workload]:
    if not others:
        return []
    device, nbytes = workload.device, workload.nbytes
    title = f"{device} write, {size_text(nbytes)}, beside peers"
    contenders = (writes.ours(device, nbytes, "passive-target", asleep=True), *others)
    return [Workload("device", device, title, nbytes, "passive-target", contenders)]


def _beside_libfabric(workload: Workload, others: Sequence[Contender]) -> Workload:
    """It polls. A small write is held against it alone, a large one against blocking sockets as well."""
    workload = _with(workload, others)
    if workload.nbytes <= writes.SMALL:
        return replace(workload, limits=("libfabric", *workload.limits), target=Target(shares={"libfabric": 1.0}))
    if workload.target is None:
        return workload
    return replace(workload, target=Target(shares={**workload.target.shares, "libfabric": 1.0}))
