"""``tensorwire plan``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from tensorwire.charts.figure import check_picture
from tensorwire.cli.interrupts import interruptible
from tensorwire.errors import ArgumentError
from tensorwire.extras import how_to_install
from tensorwire.observe.files import check_file, save_file
from tensorwire.progress import Tell, progress

if TYPE_CHECKING:
    from tensorwire.cli.plan.summary import Summary


@click.command(short_help="Say what a model would send between hosts.")
@click.argument("what", metavar="NAME|SCRIPT")
@click.option("--hosts", type=click.IntRange(2, 64), default=2, show_default=True, help="How many.")
@click.option(
    "--place", "places", multiple=True, metavar="PATH=HOST", help="Where a module runs, such as net.3=worker:1."
)
@click.option("--batch", type=click.IntRange(1, 2**30), metavar="N", help="Samples a step; else what the model says.")
@click.option("--inference", is_flag=True, help="No gradients.")
@click.option("--json", "json_file", metavar="FILE", help="Write all of it for programs.")
@click.option("--plot", metavar="PICTURE", help="Draw the graphs, cut into their parts; a .png, .svg or .pdf.")
def plan(
    what: str,
    hosts: int,
    places: Sequence[str],
    batch: int | None,
    inference: bool,
    json_file: str | None,
    plot: str | None,
) -> None:
    """Say what a model's parameters are, and what a step sends between the hosts that its parts run on.

    It needs no job, and no memory for weights: the model is traced on tensors that have none.

    \b
    NAME    alexnet, inception, vgg16, lstm, gru, fcn5, gpt2; llama-70b (needs transformers, and a minute)
    SCRIPT  a Python file with two functions:
              def model(): return MyModel()                 # any module of torch
              def inputs(): return (torch.zeros(8, 784),)   # what it is called with; inputs(batch) for --batch
            and, if it likes, hosts = {"net.3": "worker:1"}, as tensorwire.torch.place takes them

    \b
    Examples:
      tensorwire plan vgg16
      tensorwire plan gpt2 --place blocks.6=worker:1 --place blocks.7=worker:1 --plot gpt2.png
      tensorwire plan model.py --hosts 3 --json plan.json

    A module runs where the longest PATH says that names it or a module around it, others on worker:0. HOST is worker:0,
    worker:1 and so on. If nothing is said, the model is cut in the order of its layers, so that every host has as many
    bytes of parameters.
    """
    names = tuple(f"worker:{i}" for i in range(hosts))
    placement = dict(map(_place, places))
    if json_file is not None:  # before minutes of work, not after
        check_file(json_file, option="--json")
    if plot is not None:
        check_picture(plot, option="--plot")
    with interruptible(), progress("loading PyTorch") as tell:
        found = _summary(what, names, placement, batch, inference=inference, tell=tell)
    found.show()
    if json_file is not None:
        save_file(json_file, found.json().encode(), option="--json")
    if plot is not None:
        from tensorwire.cli.plan.drawing import plot_plans

        plot_plans(plot, found.name, found.planned, option="--plot")


def _summary(
    what: str, names: tuple[str, ...], placement: Mapping[str, str], batch: int | None, *, inference: bool, tell: Tell
) -> Summary:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ArgumentError(f"tensorwire plan needs PyTorch: {how_to_install('torch')}") from None
    from tensorwire.cli.plan.catalog import find_model
    from tensorwire.cli.plan.cut import cut
    from tensorwire.cli.plan.summary import Summary
    from tensorwire.torch.graph.planning.plans import plans
    from tensorwire.torch.graph.planning.trace import survey

    tell(f"making {what}")
    model = find_model(what, batch)
    said = placement or model.hosts
    wrong = sorted(set((said or {}).values()) - set(names))
    if wrong:
        raise ArgumentError(f"{wrong[0]!r} is none of the hosts, {', '.join(names)} (see --hosts)")
    tell(f"tracing {model.name}")
    found = survey(model.make, model.inputs, inference=inference)
    tell(f"planning what crosses between {len(names)} hosts")
    start = time.perf_counter()
    chosen = said or cut(found.layers(), names)
    with warnings.catch_warnings(record=True) as warned:  # of tied parameters
        warnings.simplefilter("always")
        planned = plans(found, names, chosen)
    seconds = (found.seconds, time.perf_counter() - start)
    for warning in warned:
        click.echo(f"tensorwire: {warning.message}", err=True)
    return Summary(model.name, found.parameters, chosen, not said, planned, seconds)


def _place(given: str) -> tuple[str, str]:
    path, equals, host = given.rpartition("=")
    if not equals or not host:
        raise ArgumentError(f"--place is PATH=HOST, not {given!r}")
    return path, host
