"""``python -m benchmarks``: its commands and their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tensorwire.cli import bench_options, run_command
from tensorwire.cli.bench_options import MODELS, devices, link, names, plain, processes, shown, sizes, workload

_MODES = ("sync", "async", "ssp", "easgd", "localsgd", "diloco", "streaming", "decoupled")
_TRANSFORMERS = ("bert", "llama", "vit")


def _peers(default: str, *known: str) -> Callable[..., Any]:
    return click.option(
        "--peers",
        default=default,
        show_default=True,
        metavar="NAMES",
        callback=names("", known),
        help=f"Beside what: {', '.join(known)}.",
    )


_peer_python = click.option(
    "--peer-python", metavar="PATH", help="The Python that has the other libraries; by default this one."
)
_steps = click.option(
    "--steps", type=click.IntRange(1, 10_000), default=3, show_default=True, help="Timed steps a round."
)
_report = click.option(
    "--report", default="", metavar="FILE", help="Draw the steps' parts (.png, .svg, .pdf); train: tell tensor sizes."
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
      python -m benchmarks device --peers all
      python -m benchmarks mxnet --quick
    """


@group.command()
@plain
@devices("Which transports.", "shm,tcp", "shm", "tcp")
@sizes
@click.option(
    "--peers", default="all", show_default=True, metavar="NAMES", help="Beside what: all, none, or such as ucx,grpc."
)
@_peer_python
def device(peers: str, **options: Any) -> None:
    """Writes over shm and tcp, beside libfabric and other libraries, and what tensorwire bench has beside them."""
    from benchmarks.libraries import parse_peers

    _run("device", peers=tuple(parse_peers(peers)), **options)


@group.command()
@plain
@devices("Which transports.", "shm,tcp", "shm", "tcp", "verbs")
@sizes
@_peers("grpc,torch-rpc,gloo", "grpc", "torch-rpc", "gloo")
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
@click.option(
    "--part",
    type=click.Choice(["steps", "pushes", "rows", "diloco"]),
    default="steps",
    show_default=True,
    help="pushes: of 4 KiB; rows: of a table; diloco: over --link, beside torchft.",
)
@link("diloco: over a shaped link, 100mbit, 1gbit or both; needs root and iproute2.")
def store(**options: Any) -> None:
    """The parameter store's step, push and pull, or small pushes, or batches of rows, beside gRPC."""
    _run("store", **options)


@group.command()
@shown
@workload(
    "all, or alexnet, inception, vgg16, lstm, gru, fcn5, gpt2; also vgg16-sleeping, whose layers sleep.",
    "vgg16-sleeping",
)
@devices("The store's transports: shm, tcp.", "shm", "shm", "tcp")
@link("tcp over a shaped link, 1gbit or 10gbit or both; needs root and iproute2. Give --device tcp.")
@_peers("ddp", "ddp", "grpc", "none")
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
    from benchmarks.training import check

    check(options["workloads"], options["devices"], options["links"])
    _run("train", **options)


@group.command()
@shown
@workload(
    "all, or alexnet, inception, vgg16, lstm, gru, fcn5, gpt2; with transformers also bert, llama, vit.",
    every=(*MODELS, *_TRANSFORMERS),
    default="gpt2",
)
@devices("Between the workers: shm, tcp.", "shm", "shm", "tcp")
@click.option(
    "--modes",
    default="zerocopy,copy,rpc",
    show_default=True,
    metavar="NAMES",
    callback=names("mode", ("zerocopy", "copy", "rpc")),
    help="How tensors cross; rpc is a call of gRPC for each.",
)
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
@click.option(
    "--data",
    "datas",
    default="digits,fashion",
    show_default=True,
    metavar="NAMES",
    callback=names("data", ("digits", "fashion")),
    help="What to train on; fashion is Fashion-MNIST.",
)
@click.option(
    "--modes",
    default=",".join(_MODES),
    show_default=True,
    metavar="NAMES",
    callback=names("mode", _MODES),
    help="The demo's names of modes.",
)
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


def _counts(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    return tuple(map(int, names("", ("1", "2", "3", "4"))(context, parameter, value)))


@group.command()
@shown
@click.option(
    "--part",
    type=click.Choice(["all", "pushpull", "train", "kill"]),
    default="all",
    show_default=True,
    help="pushpull: of one key; train: two perceptrons; kill, which all leaves out: what a killed process leaves.",
)
@devices("Our transports on one machine.", "shm,tcp", "shm", "tcp")
@link("tcp over a shaped link, 1gbit or 10gbit or both, instead of one machine; needs root and iproute2.")
@sizes
@click.option(
    "--workers",
    "counts",
    default="",
    metavar="COUNTS",
    callback=_counts,
    help="Worker processes, 1 to 4; by default 1 for pushpull, and 1,2 for train.",
)
@_steps
@click.option("--report", default="", metavar="FILE", help="Draw the seconds per epoch (.png, .svg, .pdf).")
def mxnet(**options: Any) -> None:
    """MXNet 1.9.1 with its own parameter server, and with ours: push and pull of a key, and training.

    \b
    One server. MXNet has a Python of its own: make setup-mxnet, or the one that TENSORWIRE_MXNET_PYTHON names.
      python -m benchmarks mxnet --report epochs.svg
      sudo python -m benchmarks mxnet --part pushpull --link 1gbit,10gbit
    """
    _run("mxnet", **options)


@group.command()
@plain
@click.option(
    "--part",
    type=click.Choice(["crossings", "networks", "strategies"]),
    default="crossings",
    show_default=True,
    help="crossings: of single tensors; networks: steps of training, with variables on worker 1 or cut in two; "
    "strategies: steps of two workers with batches of their own.",
)
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
    """Tensors that cross between two workers: TensorFlow 2.21 with its own runtime over gRPC, and with our edges.

    \b
    TensorFlow has a Python of its own: make setup-tensorflow, or the one that TENSORWIRE_TENSORFLOW_PYTHON names.
      python -m benchmarks tensorflow --sizes 64,64KiB,1MiB
      python -m benchmarks tensorflow --part networks --workload fcn5,lstm --report networks.svg
      python -m benchmarks tensorflow --part strategies --workload fcn5 --steps 20
    """
    _run("tensorflow", **options)


def _run(name: str, **options: Any) -> None:
    bench_options.run("benchmarks.suite", name, **options)


def main() -> None:
    """Entry point: errors are one line."""
    run_command(group, "python -m benchmarks")
