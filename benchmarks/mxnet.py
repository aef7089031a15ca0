"""``python -m benchmarks mxnet``, push and pull: one key, by MXNet's own parameter server and by ours.

A push, and then a pull, from and into arrays of the program's own, on one machine and over links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.mxnet_jobs import OWN, Job
from tensorwire.bench import links
from tensorwire.bench.compare import Settings, Workload, compare_all
from tensorwire.bench.programs import OURS, Contender
from tensorwire.bench.records import Record, Target
from tensorwire.bench.show import Notes
from tensorwire.sizes import size_text

MIB = 2**20
SIZES = (4096, 65536, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
QUICK_SIZES = (4096, MIB)
BESIDE = f"{OURS}, shm on one machine"
# What a key of 64 MiB is to reach: least ratios on one machine, over a link, and between the two.
JUDGED = 64 * MIB
SHM, LINK, BETWEEN = 10.0, {OWN: 1.3, "iperf3": 0.95}, 21.0
_STREAMED = 16 * MIB  # bytes of a key, from which on iperf3 says what a link carries


def measure(
    job: Job, rate: str, devices: Sequence[str], sizes: Sequence[int], settings: Settings, notes: Notes
) -> list[Record]:
    """All sizes, on one machine or over the link of the job."""
    if job.ends:
        return between_links(compare_all(over_link(job, rate, sizes), settings, notes), rate)
    return compare_all(on_one_machine(job, devices, sizes), settings, notes)


def on_one_machine(job: Job, devices: Sequence[str], sizes: Sequence[int]) -> list[Workload]:
    """Each size over each device, beside MXNet's own over TCP."""
    contenders = {device: _contender(job, OURS, device, sizes) for device in devices}
    own = _contender(job, OWN, "tcp", sizes)
    made = []
    for nbytes in sizes:
        for device, ours in contenders.items():
            title = f"{device}, MXNet, {job.title}, a key of {size_text(nbytes)}"
            target = Target(shares={OWN: SHM}) if (device, nbytes) == ("shm", JUDGED) else None
            made.append(_workload(device, title, nbytes, (ours, own), target))
    return made


def over_link(job: Job, rate: str, sizes: Sequence[int]) -> list[Workload]:
    """Each size over a link, beside MXNet's own, and beside iperf3 one way with as many bytes as both ways have."""
    assert job.ends is not None
    pair = tuple(_contender(job, peer, "tcp", sizes) for peer in (OURS, OWN))
    here = replace(_contender(replace(job, ends=None), OURS, "shm", sizes), name=BESIDE)
    made = []
    for nbytes in sizes:
        title = f"tcp over a link of {rate}, MXNet, {job.title}, a key of {size_text(nbytes)}"
        beside = (here,) if (rate, nbytes) == ("1gbit", JUDGED) else ()
        wire = links.iperf(job.ends, 2 * nbytes, both_ways=False) if nbytes >= _STREAMED else ()
        target = Target(shares=LINK) if (rate, nbytes) == ("10gbit", JUDGED) else None
        made.append(_workload("tcp", title, nbytes, (*pair, *beside, *wire), target))
    return made


def between_links(records: Sequence[Record], rate: str) -> list[Record]:
    """The same; a figure of one machine among those of a link is judged beside MXNet's own over the link."""
    own = {record.workload: record.seconds for record in records if record.peer == OWN}
    return [_judged(r, own[r.workload], rate) if r.peer == BESIDE and r.workload in own else r for r in records]


def _judged(record: Record, own: float, rate: str) -> Record:
    ratio = own / record.seconds
    target = f">= {BETWEEN:.2f} of {OWN} over {rate}, a ratio between links"
    return replace(record, device="shm", limit=OWN, limit_value=own, ratio=ratio, target=target, met=ratio >= BETWEEN)


def _contender(job: Job, peer: str, device: str, sizes: Sequence[int]) -> Contender:
    """Its memory: three arrays of each worker, and three copies at either end of what is between it and the server."""
    made = job.contender(peer, device, "mxnet_pushpull.py")
    return replace(made, memory=9 * job.workers * sum(sizes))


def _workload(device: str, title: str, nbytes: int, contenders: Sequence[Contender], target: Target | None) -> Workload:
    """The payload is what is pushed, and what is pulled."""
    told = tuple(c if c.name == "iperf3" else replace(c, word=str(nbytes)) for c in contenders)
    return Workload("mxnet", device, title, 2 * nbytes, "push-then-pull", told, ("iperf3", OWN), target, stage="mxnet")
