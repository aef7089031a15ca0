"""``python -m benchmarks``: its commands and their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tensorwire.cli import bench_options, run_command
from tensorwire.cli.bench_options import MODELS, devices, named, plain, processes, shown, sizes, workload
from tensorwire.errors import ArgumentError

_CROSSINGS = ("zerocopy", "copy", "rpc")
_MODES = ("sync", "async", "ssp", "easgd", "localsgd", "diloco", "streaming", "decoupled")


def _peers(*known: str) -> Callable[..., Any]:
    return named("--peers", "", (*known, "none"), ",".join(known), f"Beside what: {', '.join(known)}, or none.")


def _part(*known: str, text: str = "What is measured; see above.") -> Callable[..., Any]:
    return click.option("--part", type=click.Choice(known), default=known[0], show_default=True, help=text)


_peer_python = click.option(
    "--peer-python", metavar="PATH", help="The Python that has the other libraries; by default this one."
)
_steps = click.option(
    "--steps", type=click.IntRange(1, 10_000), default=3, show_default=True, help="Timed steps a round."
)
_report = click.option("--report", default="", metavar="FILE", help="Draw the figures (.png, .svg, .pdf).")
_link = named(
    "--link links",
    "",
    ("100mbit", "1gbit", "10gbit"),
    "",
    "tcp over a shaped link of 100mbit, 1gbit, 10gbit instead; needs root, iproute2 and iperf3.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def group() -> None:
    """Measure Tensorwire beside other libraries, and whole steps of training.

    \b
    Start here (no root, no network; one to three minutes each, edge more):
      python -m benchmarks train
      python -m benchmarks graph
      python -m benchmarks store
      python -m benchmarks modes
      python -m benchmarks edge --sizes 64KiB,1MiB
      python -m benchmarks device
      python -m benchmarks mxnet --quick
    """


@group.command()
@plain
@devices("Which transports.", "shm,tcp", "shm", "tcp", "verbs")
@sizes
@_link
@click.option(
    "--listen", default="", metavar="HOST:PORT", help="verbs between two machines: be the one that is written to."
)
@click.option(
    "--connect", default="", metavar="HOST:PORT", help="verbs between two machines: the other one's --listen."
)
@_peers("ucx", "nixl")
@_peer_python
def device(listen: str, **options: Any) -> None:
    """Writes over shm, tcp and verbs, beside libfabric, perftest, iperf3 and other libraries.

    \b
    Between two machines (both need TENSORWIRE_SECRET_FILE):
      python -m benchmarks device --device verbs --listen 10.0.0.1:7000
      python -m benchmarks device --device verbs --connect 10.0.0.1:7000
    """
    if options["links"] and "verbs" in options["devices"]:
        raise ArgumentError("--link measures tcp")
    if (listen or options["connect"]) and options["devices"] != ("verbs",):
        raise ArgumentError("--listen and --connect measure verbs alone: give --device verbs")
    if listen:
        _run("listen", connect=listen)
    else:
        _run("device", **options)


@group.command()
@plain
@devices("Which transports.", "shm,tcp", "shm", "tcp", "verbs")
@sizes
@_peers("grpc", "gloo")
@_peer_python
def edge(**options: Any) -> None:
    """A stream of tensors over one edge, alone and between a producer and a consumer, beside other libraries."""
    _run("edge", **options)


@group.command()
@plain
@devices("Which transports.", "shm,tcp", "shm", "tcp")
@workload("Whose tensors: all, or " + ", ".join(MODELS) + "; tiny to try it out.", "tiny")
@processes
@_peer_python
@_part("steps", "keys", "rows", "diloco")
@_link
def store(**options: Any) -> None:
    """The parameter store beside gRPC, over links, and in other modes.

    \b
    Its parts:
      steps   step, push and pull of a model; --link beside iperf3
      keys    keys in the modes async, ssp and sync; pushes of 4 KiB; many workers
      rows    batches of random rows of a table, pulled and pushed
      diloco  over a --link: DiLoCo's exposed communication, and a step of sync
    """
    _run("store", **options)


@group.command()
@shown
@workload("all, or " + ", ".join(MODELS) + "; vgg16-sleeping, whose layers sleep.", "vgg16-sleeping")
@devices("The store's transports: shm, tcp.", "shm", "shm", "tcp")
@_link
@_peers("ddp")
@processes
@_steps
@click.option("--overlap", is_flag=True, help="Also with a store that is pushed to while backward runs.")
@_report
def train(**options: Any) -> None:
    """Whole steps of training: with a store, without any, and under DDP over gloo.

    \b
    SGD with momentum, synthetic inputs, one thread a worker. Some runs:
      python -m benchmarks train
      python -m benchmarks train --workload all --device shm,tcp --overlap --report steps.png
      python -m benchmarks train --workload vgg16-sleeping --overlap --device tcp --link 10gbit --workers 1
    """
    _run("train", **options)


@group.command()
@shown
@workload("all, or " + ", ".join(MODELS) + ".", default="gpt2")
@devices("Between the workers: shm, tcp.", "shm", "shm", "tcp")
@named("--modes", "mode", _CROSSINGS, ",".join(_CROSSINGS), "How tensors cross; rpc is a call of gRPC for each.")
@click.option("--workers", type=click.IntRange(2, 8), default=2, show_default=True, help="Processes with a part each.")
@_steps
@_report
def graph(**options: Any) -> None:
    """Training steps of a model whose parts run on several workers: zerocopy, copy, rpc, and one process alone.

    \b
    SGD with momentum, synthetic inputs, one thread a process. Some runs:
      python -m benchmarks graph
      python -m benchmarks graph --workload all --device shm,tcp --report graphs.png
    """
    _run("graph", **options)


@group.command()
@shown
@named("--data datas", "data", ("digits", "fashion"), "digits,fashion", "Train on what; fashion is Fashion-MNIST.")
@named("--modes", "mode", _MODES, ",".join(_MODES), "The demo's names of modes.")
@click.option("--seconds", type=click.FloatRange(1), default=20.0, show_default=True, help="Of each training.")
@click.option("--width", type=click.IntRange(1), default=256, show_default=True, help="Of the hidden layers.")
@devices("The store's transport: shm or tcp.", "shm", "shm", "tcp")
@click.option("--report", default="", metavar="FILE", help="Draw the losses (.png, .svg, .pdf).")
def modes(**options: Any) -> None:
    """The demo in every training mode: whether it reaches its accuracy, and a picture of its losses.

    \b
      python -m benchmarks modes --report modes.svg
      python -m benchmarks modes --width 4096 --seconds 75
    """
    _run("convergence", **options)


@group.command()
@shown
@_part("all", "pushpull", "train", text="pushpull: of one key; train: two perceptrons.")
@devices("Our transports on one machine.", "shm,tcp", "shm", "tcp")
@_link
@sizes
@named("--workers counts", "", ("1", "2", "3", "4"), "", "Processes; by default 1 for pushpull, and 1,2 for train.")
@_steps
def mxnet(counts: tuple[str, ...], **options: Any) -> None:
    """MXNet 1.9.1 with its own parameter server, and with ours: push and pull of a key, and training.

    \b
    One server. MXNet has a Python of its own: make setup-mxnet, or the one that TENSORWIRE_MXNET_PYTHON names.
      python -m benchmarks mxnet --part train
      sudo python -m benchmarks mxnet --part pushpull --link 1gbit,10gbit
    """
    _run("mxnet", counts=tuple(map(int, counts)), **options)


@group.command()
@plain
@_part("crossings", "networks", "strategies")
@workload(
    "networks, strategies: all, or alexnet, inception, vgg16, lstm, gru, fcn5.",
    every=("alexnet", "inception", "vgg16", "lstm", "gru", "fcn5"),
    default="all",
)
@devices("Our transports.", "shm,tcp", "shm", "tcp")
@sizes
@_steps
@_report
def tensorflow(**options: Any) -> None:
    """TensorFlow 2.21 on two workers, with its own runtime over gRPC, and with our edges and store.

    \b
    Its parts:
      crossings   single tensors that cross
      networks    steps of training, with variables on worker 1 or cut in two
      strategies  steps of two workers with batches of their own

    \b
    TensorFlow has a Python of its own: make setup-tensorflow, or the one that TENSORWIRE_TENSORFLOW_PYTHON names.
      python -m benchmarks tensorflow --sizes 64,64KiB,1MiB
      python -m benchmarks tensorflow --part networks --workload fcn5,lstm --report networks.svg
      python -m benchmarks tensorflow --part strategies --workload fcn5 --steps 20
    """
    _run("tensorflow", **options)


@group.command()
@plain
@devices("How our reader reads.", "shm", "shm", "tcp")
@sizes
@_link
@_peers("rpc", "gloo", "grpc", "file", "flight")
@_peer_python
@_report
def versions(**options: Any) -> None:
    """Weights for a reader: a new version, and the one that is there, beside other libraries; --link beside iperf3.

    \b
    rpc is torch's, file a safetensors file in memory, and flight Arrow's (pip install pyarrow).
      python -m benchmarks versions --report weights.svg
      sudo python -m benchmarks versions --link 10gbit
    """
    _run("weights", **options)


def _run(name: str, **options: Any) -> None:
    bench_options.run("benchmarks.suite", name, **options)


def main() -> None:
    """Entry point: errors are one line."""
    run_command(group, "python -m benchmarks")
