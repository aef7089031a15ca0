"""The options that all benchmarks share, and the run of a benchmark."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import click

from tensorwire.cli.interrupts import interruptible
from tensorwire.errors import ArgumentError
from tensorwire.progress import progress

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
MODELS = ("alexnet", "inception", "vgg16", "lstm", "gru", "fcn5", "gpt2")


Parse = Callable[[click.Context, click.Parameter, str], tuple[str, ...]]


def names(what: str, known: tuple[str, ...]) -> Parse:
    """Parses names of ``known`` with commas between them; none of them only where ``what`` is empty."""

    def parse(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(name for name in value.split(",") if name))
        for name in chosen:
            if name not in known:
                raise click.BadParameter(f"{name!r} is not one of {', '.join(known)}")
        if what and not chosen:
            raise click.BadParameter(f"no {what}: one or more of {', '.join(known)}")
        return chosen

    return parse


def parse_sizes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Parses sizes with commas between them."""
    found = []
    for part in value.split(",") if value else ():
        digits = part.strip().rstrip("KMGiBkmgb ")
        factor = _UNITS.get(part.strip()[len(digits) :].strip().lower())
        if factor is None or not digits.isdecimal() or not 64 <= int(digits) * factor <= 2**32:
            raise click.BadParameter(f"{part!r} is not a size from 64 to 4GiB, such as 64, 4KiB or 16MiB")
        if int(digits) * factor % 64:
            raise click.BadParameter(f"{part!r} is not a multiple of 64 bytes")
        found.append(int(digits) * factor)
    return tuple(found)


def shown(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every benchmark."""
    for option in (
        click.option("--markdown", is_flag=True, help="Print the table as Markdown."),
        click.option("--json", metavar="FILE", help="Write all records to FILE as well."),
        click.option("--quick", is_flag=True, help="Seconds instead of minutes; figures mean little."),
        click.option("--rounds", type=click.IntRange(1, 1000), help="Interleaved rounds; figures are their medians."),
    ):
        command = option(command)
    return command


def plain(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same where an initiator and a target are pinned."""
    option = click.option(
        "--cores", metavar="A,B", help="Processors of initiator and target; by default the first two."
    )
    return shown(option(command))


def named(option: str, what: str, known: tuple[str, ...], default: str, text: str) -> Callable[..., Any]:
    """An option whose values are `names` of ``known``."""
    parse, (flag, *parameter) = names(what, known), option.split()
    return click.option(
        flag, *parameter, default=default, show_default=bool(default), metavar="NAMES", callback=parse, help=text
    )


def devices(what: str, default: str, *known: str) -> Callable[..., Any]:
    """The option that names devices: some of ``known``."""
    return named("--device devices", "device", known, default, what)


def workload(what: str, *others: str, every: tuple[str, ...] = MODELS, default: str = "fcn5") -> Callable[..., Any]:
    """The option of a benchmark of models: ``every`` one is ``all``, which leaves out ``others``."""

    def parse(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
        return every if value == "all" else names("workload", (*every, *others))(context, parameter, value)

    return click.option(
        "--workload", "workloads", default=default, show_default=True, metavar="NAMES", callback=parse, help=what
    )


def processes(command: Callable[..., Any]) -> Callable[..., Any]:
    """How many train."""
    several = click.IntRange(1, 64)
    servers = click.option("--servers", type=several, default=1, show_default=True, help="Server processes.")
    return click.option("--workers", type=several, default=2, show_default=True, help="Worker processes.")(
        servers(command)
    )


sizes = click.option("--sizes", default="", metavar="SIZES", callback=parse_sizes, help="Bytes, as in 64,4KiB,16MiB.")


def run(suite: str, name: str, **options: Any) -> None:
    """Runs the benchmark ``name`` of the module ``suite``."""
    if sys.platform != "linux":
        raise ArgumentError("the benchmarks run on Linux only")
    # Ends as Ctrl-C does: with no process and no network namespace left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with interruptible():
        with progress("loading the benchmark"):
            module = importlib.import_module(suite)
        getattr(module, name)(module.Options(**options))
