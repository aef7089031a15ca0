"""``python -m benchmarks versions``: weights for a reader beside other libraries, or over a link.

Time is taken from the reader's request until its own tensors hold the weights that the trainer has. It is also told as
so much for each tensor, and a bandwidth: what fits the sizes best.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks import ACTORS, links
from benchmarks.libraries import ONE_ARENA, Libraries, Peer
from benchmarks.links import Places
from benchmarks.options import Options
from tensorwire.bench.compare import Settings, Workload, compare_all
from tensorwire.bench.programs import HERE, OURS, Contender, actor, pair
from tensorwire.bench.records import Record, Target, time_text
from tensorwire.bench.show import Notes
from tensorwire.bench.weights import SIZES as MACHINE_SIZES
from tensorwire.bench.weights import TENSORS, Weights
from tensorwire.charts.figure import save_picture

MIB = 2**20
SIZES, QUICK_SIZES = (4 * MIB, 64 * MIB, 512 * MIB), (MIB, 4 * MIB)
MANY = 512  # tensors, of which the smallest size is measured, too
PULL, MODULE, FILE = f"{OURS}, pull alone", f"{OURS}, load_into", f"{OURS}, a file"
_OVER_LINK = 0.90
_PEERS = (
    Peer("rpc", "weights.py", ("torch.distributed.rpc",), "pip install torch"),
    Peer("gloo", "weights.py", ("torch.distributed",), "pip install torch"),
    Peer("grpc", "weights.py", ("grpc", "torch"), "pip install grpcio", environment=ONE_ARENA),
    Peer("file", "weights.py", ("safetensors.torch",), "pip install safetensors"),
    Peer("flight", "weights.py", ("pyarrow.flight", "torch"), "pip install pyarrow", environment=ONE_ARENA),
)
NAMES = tuple(peer.name for peer in _PEERS)
TITLES = {"rpc": "torch RPC", "gloo": "gloo broadcast", "file": "safetensors file", "flight": "Arrow Flight"}

FIT_TITLE = "What a tensor takes, and at what rate bytes come: what fits the sizes best"
FIT_HEAD = ("device", "who", "per tensor", "rate")


def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """Beside other libraries on this machine, or beside iperf3 over each link."""
    if options.links:
        nbytes = QUICK_SIZES[0] if options.quick else MACHINE_SIZES[0]
        long = replace(settings, rounds=min(settings.rounds, 3), seconds=0.02 if options.quick else 3.0)
        return links.over_each(options.links, notes, lambda *link: compare_all([over_link(nbytes, *link)], long, notes))
    libraries = Libraries(options.peer_python, notes)
    peers = [(peer, program) for peer in _PEERS if peer.name in options.peers and (program := libraries.program(peer))]
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    shapes = [(nbytes, TENSORS) for nbytes in sizes] + [(sizes[0], MANY)]
    weights = [Weights(nbytes, device, tensors=count) for device in options.devices for nbytes, count in shapes]
    with tempfile.TemporaryDirectory(prefix="tensorwire-bench-", dir="/dev/shm") as folder:
        return compare_all([workload(each, peers, folder) for each in weights], settings, notes)


def workload(weights: Weights, peers: Sequence[tuple[Peer, tuple[str, ...]]], folder: str) -> Workload:
    """One size. Ours with a new version, with the one that is there, and with all that ``load_into`` does."""
    ours = weights.contender(HERE, actor("weights", ACTORS))
    contenders = [replace(ours, word="asked:new:1"), replace(ours, name=PULL, word="idle:pull:1")]
    contenders.append(replace(ours, name=MODULE, word="asked:new-module:1"))
    contenders += [
        Contender(
            TITLES.get(peer.name, peer.name),
            pair(program, peer.name, weights.nbytes, weights.tensors, folder),
            meanwhile=1,
            stopped=True,
            together=True,
            environment={"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo", **peer.environment},
            memory=4 * weights.nbytes,
        )
        for peer, program in peers
    ]
    made = weights.workload("weights", contenders, "grpc", None)
    return replace(made, limits=("grpc", TITLES["file"]), stage="")


def over_link(nbytes: int, rate: str, places: Places) -> Workload:
    """A reader at the other end of a cable, while the worker trains; against iperf3 beside the same worker."""
    ours = Weights(nbytes, "tcp").contender(places, actor("weights", ACTORS))
    contenders = (
        replace(ours, word="training:pull:1"),
        replace(ours, name=FILE, word="training:readinto:1"),
        replace(ours, name="iperf3", word="training:iperf:1"),
    )
    made = Weights(nbytes, "tcp").workload("read-training", contenders, "iperf3", Target(shares={"iperf3": _OVER_LINK}))
    return replace(made, name=f"{made.name}, over a link of {rate}")


# ---- what a tensor takes, and a byte


def fits(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """A row for each device and contender that was measured with different tensors."""
    rows: list[tuple[str, ...]] = []
    for device, peer in dict.fromkeys((record.device, record.peer) for record in records):
        sizes = [(tensors_of(r), r.bytes, r.seconds) for r in records if (r.device, r.peer) == (device, peer)]
        if len(sizes) > 1:
            tensor, byte = fit(sizes)
            rate = f"{1 / byte / 1e9:.3g} GB/s" if byte else ""
            rows.append((device, peer, time_text(tensor) if tensor else "0", rate))
    return rows


def fit(sizes: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """Seconds for each tensor and for each byte, by the least squares of the relative errors; neither below 0.

    ``sizes``: tensors, bytes and seconds.
    """
    shares = np.array([(count / seconds, nbytes / seconds) for count, nbytes, seconds in sizes])
    found = np.linalg.lstsq(shares, np.ones(len(sizes)), rcond=None)[0]
    if (below := found < 0).any():
        column = shares[:, ~below]
        found = np.where(below, 0.0, np.linalg.lstsq(column, np.ones(len(sizes)), rcond=None)[0].sum())
    return float(found[0]), float(found[1])


def tensors_of(record: Record) -> int:
    """How many tensors a record's workload has, which its name says."""
    return int(record.workload.partition(" in ")[2].partition(" ")[0])


# ---- the chart


def chart(records: Sequence[Record], path: str, machine: Sequence[str]) -> None:
    """Time and pause against size, a line a contender, a row a device. Raises `ArgumentError`."""
    from matplotlib.figure import Figure

    devices = list(dict.fromkeys(record.device for record in records))
    figure = Figure(figsize=(10, 0.9 + 3.6 * len(devices)), layout="constrained")
    panels = figure.subplots(len(devices), 2, squeeze=False, sharey="row")
    for device, row in zip(devices, panels, strict=True):
        shown = [r for r in records if r.device == device and tensors_of(r) == TENSORS]
        for axes, what in zip(row, ("time until a reader has the weights", "pause of the reader"), strict=True):
            for number, peer in enumerate(dict.fromkeys(r.peer for r in shown)):
                points = [(r.bytes / MIB, _milliseconds(r, what)) for r in shown if r.peer == peer]
                dashes = "-" if peer.startswith(OURS) else "--"
                axes.plot(*zip(*points, strict=True), dashes, marker="osD^v<>P"[number % 8], markersize=4, label=peer)
            axes.set(xscale="log", yscale="log", xlabel="MiB", ylabel="milliseconds")
            axes.set_title(f"{device}: {what}, {TENSORS} tensors", loc="left", fontsize=9)
            axes.grid(color="#DDDDDD", linewidth=0.5)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    figure.supxlabel("\n".join(machine), fontsize=6)
    save_picture(figure, path, option="--report")


def _milliseconds(record: Record, what: str) -> float:
    return 1e3 * ((record.details or {})["pause"] if what.startswith("pause") else record.seconds)
