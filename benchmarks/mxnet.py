"""``python -m benchmarks mxnet``, push and pull: one key, by MXNet's own parameter server and by ours.

A push, and then a pull, from and into arrays of the program's own, on one machine and over links. MXNet has a Python
of its own, which runs the programs ``peers/mxnet_*.py``: the same ones for its own store, ps-lite, and for ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks import links
from benchmarks.libraries import PROGRAMS, framework_python
from benchmarks.links import Places
from benchmarks.options import Options
from tensorwire.bench.compare import Settings, Workload, compare_all
from tensorwire.bench.programs import HERE, OURS, Contender, job
from tensorwire.bench.records import Record, Target
from tensorwire.bench.show import Notes
from tensorwire.sizes import counted, size_text

OWN = "mxnet"
STORES = {OURS: "dist_tensorwire_sync", OWN: "dist_sync"}
MIB = 2**20
SIZES = (4096, 65536, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
QUICK_SIZES = (4096, MIB)
BESIDE = f"{OURS}, shm on one machine"
# What a key of 64 MiB is to reach: least ratios on one machine, over a link, and between the two.
JUDGED = 64 * MIB
SHM, LINK, BETWEEN = 10.0, {OWN: 1.3, "iperf3": 0.95}, 21.0
_STREAMED = 16 * MIB  # bytes of a key, from which on iperf3 says what a link carries


def find_python() -> str:
    """The Python that has MXNet. Raises `MissingPackage`."""
    return framework_python("MXNet 1.9.1", "mxnet")


def mxnet_job(
    script: str, python: str, peer: str, device: str, workers: int, places: Places, *arguments: object, memory: int = 0
) -> Contender:
    """One server, and workers, of `OURS` over ``device``, or of `OWN`, which knows TCP alone."""
    program = (python, str(PROGRAMS / script))
    return job(peer, program, STORES[peer], *arguments, device, workers=workers, places=places, memory=memory)


def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """All sizes, on one machine or over links."""
    python, counts = find_python(), options.counts or (1,)
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)

    def over(rate: str, places: Places) -> list[Record]:
        made = [compare_all(over_link(python, n, rate, places, sizes), settings, notes) for n in counts]
        return [record for some in made for record in between_links(some, rate)]

    if options.links:
        return links.over_each(options.links, notes, over)
    made = [on_one_machine(python, n, options.devices, sizes) for n in counts]
    return [record for some in made for record in compare_all(some, settings, notes)]


def on_one_machine(python: str, workers: int, devices: Sequence[str], sizes: Sequence[int]) -> list[Workload]:
    """Each size over each device, beside MXNet's own over TCP."""
    contenders = {device: _contender(python, OURS, device, workers, HERE, sizes) for device in devices}
    own = _contender(python, OWN, "tcp", workers, HERE, sizes)
    made = []
    for nbytes in sizes:
        for device, ours in contenders.items():
            title = f"{device}, MXNet, {counted(workers, 'worker')}, a key of {size_text(nbytes)}"
            target = Target(shares={OWN: SHM}) if (device, nbytes) == ("shm", JUDGED) else None
            made.append(_workload(device, title, nbytes, (ours, own), target))
    return made


def over_link(python: str, workers: int, rate: str, places: Places, sizes: Sequence[int]) -> list[Workload]:
    """Each size over a link, beside MXNet's own, and beside iperf3 one way with as many bytes as both ways have."""
    pair = tuple(_contender(python, peer, "tcp", workers, places, sizes) for peer in (OURS, OWN))
    here = replace(_contender(python, OURS, "shm", workers, HERE, sizes), name=BESIDE)
    made = []
    for nbytes in sizes:
        title = f"tcp over a link of {rate}, MXNet, {counted(workers, 'worker')}, a key of {size_text(nbytes)}"
        beside = (here,) if (rate, nbytes) == ("1gbit", JUDGED) else ()
        wire = links.iperf(places, 2 * nbytes, both_ways=False) if nbytes >= _STREAMED else ()
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


def _contender(python: str, peer: str, device: str, workers: int, places: Places, sizes: Sequence[int]) -> Contender:
    """Its memory: three arrays of each worker, and three copies at either end of what is between it and the server."""
    return mxnet_job("mxnet_pushpull.py", python, peer, device, workers, places, memory=9 * workers * sum(sizes))


def _workload(device: str, title: str, nbytes: int, contenders: Sequence[Contender], target: Target | None) -> Workload:
    """The payload is what is pushed, and what is pulled."""
    told = tuple(c if c.name == "iperf3" else replace(c, word=str(nbytes)) for c in contenders)
    return Workload("mxnet", device, title, 2 * nbytes, "push-then-pull", told, ("iperf3", OWN), target, stage="mxnet")
