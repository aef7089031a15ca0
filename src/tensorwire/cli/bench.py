"""``tensorwire bench``: this machine and its links. Comparisons with other libraries are in ``benchmarks``."""

from __future__ import annotations

from typing import Any

import click

from tensorwire.cli import bench_options
from tensorwire.cli.bench_options import MODELS, devices, link, plain, processes, sizes, workload
from tensorwire.errors import ArgumentError


@click.group()
def bench() -> None:
    """Measure Tensorwire beside the limits of this machine.

    \b
    Start here (no root, no network; one to three minutes each, edge more):
      tensorwire bench device
      tensorwire bench edge --sizes 64KiB,1MiB
      tensorwire bench store
      tensorwire bench faults
    """


@bench.command()
@plain
@devices("Which transports.", "shm,tcp", "shm", "tcp", "verbs")
@sizes
@link("Instead: tcp over a shaped link, 1gbit or 10gbit or both; needs root and iperf3.")
@click.option(
    "--listen", default="", metavar="HOST:PORT", help="verbs between two machines: be the one that is written to."
)
@click.option(
    "--connect", default="", metavar="HOST:PORT", help="verbs between two machines: the other one's --listen."
)
def device(listen: str, **options: Any) -> None:
    """Writes over shm, tcp or verbs, beside memcpy, blocking sockets, iperf3, and perftest.

    \b
    Between two machines (both need TENSORWIRE_SECRET_FILE):
      tensorwire bench device --device verbs --listen 10.0.0.1:7000
      tensorwire bench device --device verbs --connect 10.0.0.1:7000
    """
    from tensorwire.bench.remote import listen as serve

    if "verbs" in options["devices"] and options["links"]:
        raise ArgumentError("--link measures tcp")
    if (listen or options["connect"]) and options["devices"] != ("verbs",):
        raise ArgumentError("--listen and --connect measure verbs alone: give --device verbs")
    if listen:
        serve(listen)
        return
    _run("device", **options)


@bench.command()
@plain
@devices("Which transports.", "shm,tcp", "shm", "tcp", "verbs")
@sizes
def edge(**options: Any) -> None:
    """A stream of tensors over one edge, alone and between producer and consumer, beside copies and sockets in C."""
    _run("edge", **options)


@bench.command()
@plain
@devices("Which transports.", "shm,tcp", "shm", "tcp")
@workload("Whose tensors: all, or " + ", ".join(MODELS) + "; tiny to try it out.", "tiny")
@processes
@link("Instead: tcp over a shaped link beside iperf3, of 100mbit, 1gbit, 10gbit; needs root and iperf3.")
@click.option(
    "--part",
    type=click.Choice(["steps", "keys", "rows", "unequal", "diloco"]),
    default="steps",
    show_default=True,
    help="What is measured; see above.",
)
def store(**options: Any) -> None:
    """The parameter store over shm and tcp.

    \b
    Its parts:
      steps    step, push and pull of a model
      keys     keys in the modes async, ssp and sync; pushes of 4 KiB; many workers
      rows     batches of random rows of a table, pulled and pushed
      unequal  one of two workers slowed to a third, in the modes decoupled, ssp and sync
      diloco   over a --link: DiLoCo's exposed communication, and a step of sync
    """
    if options["links"] and options["part"] in ("keys", "rows", "unequal"):
        raise ArgumentError(f"--link goes with --part steps and diloco, not {options['part']}")
    if options["part"] == "diloco" and not options["links"]:
        raise ArgumentError("--part diloco needs a --link, such as 1gbit")
    _run("store", **options)


@bench.command()
@plain
@devices("Which transports.", "shm,tcp", "shm", "tcp")
def faults(**options: Any) -> None:
    """From the death of a process to the PeerLost of one that waits for it; over shm and tcp."""
    _run("fault", **options)


def _run(name: str, **options: Any) -> None:
    bench_options.run("tensorwire.bench.suite", name, **options)
