"""``tensorwire bench``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

import click

from tensorwire.cli.interrupts import interruptible
from tensorwire.device.registry import BUILT_IN_FOR_JOBS
from tensorwire.errors import ArgumentError
from tensorwire.progress import progress

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_LINKS = ("1gbit", "10gbit")
_MODELS = ("alexnet", "inception", "vgg16", "lstm", "gru", "fcn5", "gpt2")
_TRANSFORMERS = ("bert", "llama", "vit")


def _names(what: str, known: tuple[str, ...]) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    def parse(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name for name in value.split(",") if name))
        for name in names:
            if name not in known:
                raise click.BadParameter(f"{name!r} is not one of {', '.join(known)}")
        if what and not names:
            raise click.BadParameter(f"no {what}: one or more of {', '.join(known)}")
        return names

    return parse


def _sizes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    sizes = []
    for part in value.split(",") if value else ():
        digits = part.strip().rstrip("KMGiBkmgb ")
        factor = _UNITS.get(part.strip()[len(digits) :].strip().lower())
        if factor is None or not digits.isdecimal() or not 64 <= int(digits) * factor <= 2**32:
            raise click.BadParameter(f"{part!r} is not a size from 64 to 4GiB, such as 64, 4KiB or 16MiB")
        if int(digits) * factor % 64:
            raise click.BadParameter(f"{part!r} is not a multiple of 64 bytes")
        sizes.append(int(digits) * factor)
    return tuple(sizes)


def _workloads(
    every: tuple[str, ...], others: tuple[str, ...]
) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    def parse(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
        return every if value == "all" else _names("workload", (*every, *others))(context, parameter, value)

    return parse


def _shown(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every benchmark."""
    for option in (
        click.option("--markdown", is_flag=True, help="Print the table as Markdown."),
        click.option("--json", metavar="FILE", help="Write all records to FILE as well."),
        click.option("--quick", is_flag=True, help="Seconds instead of minutes; figures mean little."),
        click.option("--rounds", type=click.IntRange(1, 1000), help="Interleaved rounds; figures are their medians."),
    ):
        command = option(command)
    return command


def _plain(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same where an initiator and a target are pinned."""
    option = click.option(
        "--cores", metavar="A,B", help="Processors of initiator and target; by default the first two."
    )
    return _shown(option(command))


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a benchmark that runs over several devices."""
    option = click.option(
        "--device",
        "devices",
        default="shm,tcp",
        show_default=True,
        metavar="NAMES",
        callback=_names("device", BUILT_IN_FOR_JOBS),
        help="Which transports.",
    )
    return _plain(option(command))


def _transports(what: str) -> Callable[..., Any]:
    """The option of a benchmark of steps of training."""
    callback = _names("device", ("shm", "tcp"))
    return click.option(
        "--device", "devices", default="shm", show_default=True, metavar="NAMES", callback=callback, help=what
    )


def _link(what: str) -> Callable[..., Any]:
    """The option of a benchmark that runs over shaped links."""
    return click.option("--link", "links", default="", metavar="RATES", callback=_names("", _LINKS), help=what)


def _workload(what: str, *others: str, every: tuple[str, ...] = _MODELS, default: str = "fcn5") -> Callable[..., Any]:
    """The option of a benchmark of models: ``every`` one is ``all``, which leaves out ``others``."""
    parse = _workloads(every, others)
    return click.option(
        "--workload", "workloads", default=default, show_default=True, metavar="NAMES", callback=parse, help=what
    )


def _processes(command: Callable[..., Any]) -> Callable[..., Any]:
    """How many train."""
    several = click.IntRange(1, 64)
    servers = click.option("--servers", type=several, default=1, show_default=True, help="Server processes.")
    return click.option("--workers", type=several, default=2, show_default=True, help="Worker processes.")(
        servers(command)
    )


_steps = click.option(
    "--steps", type=click.IntRange(1, 10_000), default=3, show_default=True, help="Timed steps a round."
)
_peer_python = click.option(
    "--peer-python", metavar="PATH", help="The Python that has them, torch and tensorwire; by default this one."
)
_size_option = click.option("--sizes", default="", metavar="SIZES", callback=_sizes, help="Bytes, as in 64,4KiB,16MiB.")


@click.group()
def bench() -> None:
    """Measure Tensorwire beside the limits of this machine.

    \b
    Start here (no root, no network; one to three minutes each, edge more):
      tensorwire bench device
      tensorwire bench edge --sizes 64KiB,1MiB
      tensorwire bench store
      tensorwire bench train
      tensorwire bench graph
      tensorwire bench faults
    """


@bench.command()
@_common
@_size_option
@click.option(
    "--peers",
    default="none",
    show_default=True,
    metavar="NAMES",
    help="Other libraries: all, or names such as ucx,grpc.",
)
@click.option("--peer-python", metavar="PATH", help="The Python that has them; by default this one.")
@click.option("--waiting", is_flag=True, help="Instead: what waiting costs when there are more processes than cores.")
@_link("Instead: tcp over a shaped link, 1gbit or 10gbit or both; needs root and iperf3.")
@click.option(
    "--listen", default="", metavar="HOST:PORT", help="verbs between two machines: be the one that is written to."
)
@click.option(
    "--connect", default="", metavar="HOST:PORT", help="verbs between two machines: the other one's --listen."
)
def device(peers: str, listen: str, **options: Any) -> None:
    """Writes over shm, tcp or verbs, beside memcpy, blocking sockets, libfabric, and perftest.

    \b
    Between two machines (both need TENSORWIRE_SECRET_FILE):
      tensorwire bench device --device verbs --listen 10.0.0.1:7000
      tensorwire bench device --device verbs --connect 10.0.0.1:7000
    """
    from tensorwire.bench.baselines import parse_peers
    from tensorwire.bench.far import listen as serve

    if "verbs" in options["devices"] and (options["waiting"] or options["links"]):
        raise ArgumentError("--waiting and --link measure shm and tcp")
    if (listen or options["connect"]) and options["devices"] != ("verbs",):
        raise ArgumentError("--listen and --connect measure verbs alone: give --device verbs")
    if listen:
        serve(listen)
        return
    _run("device", peers=tuple(parse_peers(peers)), **options)


@bench.command()
@_common
@_size_option
@click.option(
    "--peers",
    default="grpc,torch-rpc,gloo",
    show_default=True,
    metavar="NAMES",
    callback=_names("", ("none", "grpc", "torch-rpc", "gloo")),
    help="Other libraries: grpc, torch-rpc, gloo; or none.",
)
@_peer_python
def edge(**options: Any) -> None:
    """A stream of tensors over one edge, alone and between a producer and a consumer, beside other libraries."""
    _run("edge", **options)


@bench.command()
@_plain
def posting(**options: Any) -> None:
    """What verbs costs before the NIC has it: on a NIC that does nothing, so that none is needed."""
    _run("posting", devices=(), **options)


@bench.command()
@_common
@_workload("Whose tensors: all, or " + ", ".join(_MODELS) + "; tiny to try it out.", "tiny")
@_processes
@click.option(
    "--peers",
    default="grpc",
    show_default=True,
    metavar="NAMES",
    callback=_names("", ("none", "grpc")),
    help="Other stores: grpc, or none.",
)
@_peer_python
@_link("Instead: tcp over a shaped link beside iperf3, 1gbit or 10gbit or both; needs root and iperf3.")
def store(**options: Any) -> None:
    """The parameter store's step, push and pull, beside a store on gRPC; over shm and tcp."""
    if "verbs" in options["devices"]:
        raise ArgumentError("bench store measures shm and tcp")
    _run("store", **options)


@bench.command()
@_common
def faults(**options: Any) -> None:
    """From the death of a process to the PeerLost of one that waits for it; over shm and tcp."""
    if "verbs" in options["devices"]:
        raise ArgumentError("bench faults measures shm and tcp")
    _run("fault", **options)


@bench.command()
@_shown
@_workload(
    "all, or alexnet, inception, vgg16, lstm, gru, fcn5, gpt2; also vgg16-elsewhere, whose layers sleep.",
    "vgg16-elsewhere",
)
@_transports("The store's transports: shm, tcp.")
@_link("tcp over a shaped link, 1gbit or 10gbit or both; needs root and iproute2. Give --device tcp.")
@click.option(
    "--peers",
    default="ddp",
    show_default=True,
    metavar="NAMES",
    callback=_names("", ("ddp", "grpc", "none")),
    help="Who else trains: none, or ddp, grpc.",
)
@_processes
@_steps
@click.option("--overlap", is_flag=True, help="Also with a store that is pushed to while backward runs.")
@click.option(
    "--report", default="", metavar="FILE", help="Draw the steps' parts (.png, .svg, .pdf); tell tensor sizes."
)
def train(**options: Any) -> None:
    """Whole steps of training: with a store, without any, and under DDP over gloo.

    \b
    SGD with momentum, synthetic inputs, one thread a worker. Some runs:
      tensorwire bench train
      tensorwire bench train --workload all --device shm,tcp --overlap --report steps.png
      tensorwire bench train --workload vgg16-elsewhere --overlap --device tcp --link 10gbit --workers 1
    """
    from tensorwire.bench.training import check

    check(options["workloads"], options["devices"], options["links"])
    _run("train", **options)


@bench.command()
@_shown
@_workload(
    "all, or alexnet, inception, vgg16, lstm, gru, fcn5, gpt2; with transformers also bert, llama, vit.",
    every=(*_MODELS, *_TRANSFORMERS),
    default="gpt2",
)
@_transports("Between the hosts: shm, tcp.")
@click.option(
    "--modes",
    default="zerocopy,copy,rpc",
    show_default=True,
    metavar="NAMES",
    callback=_names("mode", ("zerocopy", "copy", "rpc")),
    help="How tensors cross.",
)
@click.option("--hosts", type=click.IntRange(2, 8), default=2, show_default=True, help="Processes with a part each.")
@_steps
@click.option("--report", default="", metavar="FILE", help="Draw the steps' parts (.png, .svg, .pdf).")
def graph(**options: Any) -> None:
    """Training steps of a model whose parts run on several hosts: zerocopy, copy, rpc, and one process alone.

    \b
    SGD with momentum, synthetic inputs, one thread a process. Some runs:
      tensorwire bench graph
      tensorwire bench graph --workload all --device shm,tcp --report graphs.png
    """
    _run("graph", **options)


def _run(name: str, **options: Any) -> None:
    if sys.platform != "linux":
        raise ArgumentError("tensorwire bench runs on Linux only")
    # Ends as Ctrl-C does: with no process and no network namespace left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with interruptible():
        with progress("loading the benchmark"):
            from tensorwire.bench import suite
        getattr(suite, name)(suite.Options(**options))
