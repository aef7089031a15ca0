"""``tensorwire bench``: this machine. Links, and comparisons with other libraries, are in ``benchmarks``."""

from __future__ import annotations

from typing import Any

import click

from tensorwire.cli import bench_options
from tensorwire.cli.bench_options import MODELS, devices, plain, processes, sizes, workload


@click.group()
def bench() -> None:
    """Measure Tensorwire beside the limits of this machine.

    \b
    Start here (no root, no network; one to three minutes each, edge more):
      tensorwire bench device
      tensorwire bench edge --sizes 64KiB,1MiB
      tensorwire bench store
      tensorwire bench faults
      tensorwire bench versions
      tensorwire bench files
    """


@bench.command()
@plain
@devices("Which transports.", "shm,tcp", "shm", "tcp", "verbs")
@sizes
def device(**options: Any) -> None:
    """Writes over shm, tcp or verbs, beside memcpy and blocking sockets in C."""
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
def store(**options: Any) -> None:
    """The parameter store's step, push and pull of a model, over shm and tcp."""
    _run("store", **options)


@bench.command()
@plain
@devices("Which transports.", "shm,tcp", "shm", "tcp")
def faults(**options: Any) -> None:
    """From the death of a process to the PeerLost of one that waits for it; over shm and tcp."""
    _run("fault", **options)


@bench.command()
@plain
@devices("How readers read.", "shm,tcp", "shm", "tcp")
def versions(**options: Any) -> None:
    """Weights for readers: reads, files, pauses and what training pays, beside copies in C and plain files."""
    _run("versions", **options)


@bench.command()
@plain
@devices("How files are read and written.", "shm,tcp", "shm", "tcp")
def files(**options: Any) -> None:
    """A job as files: reads in Python and through a mount, pushes by writing, and what training pays."""
    _run("files", **options)


def _run(name: str, **options: Any) -> None:
    bench_options.run("tensorwire.bench.suite", name, **options)
