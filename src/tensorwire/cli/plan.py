"""``tensorwire plan``."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensorwire.cli.interrupts import interruptible
from tensorwire.errors import ArgumentError
from tensorwire.extras import how_to_install
from tensorwire.observe.files import check_file, save_file
from tensorwire.progress import Tell, progress

if TYPE_CHECKING:
    from tensorwire.cli.plan_report import Report


@click.command(short_help="Say what a model would send between hosts.")
@click.argument("what", metavar="NAME|SCRIPT")
@click.option("--hosts", type=click.IntRange(2, 64), default=2, show_default=True, help="How many.")
@click.option(
    "--place", "places", multiple=True, metavar="PATH=HOST", help="Where a module runs, such as net.3=worker:1."
)
@click.option("--batch", type=click.IntRange(1, 2**30), metavar="N", help="Samples a step; else what the model says.")
@click.option("--inference", is_flag=True, help="No gradients.")
@click.option("--repeat", metavar="PATH=N", help="The one layer PATH, such as model.layers.0, stands for N.")
@click.option("--json", "json_file", metavar="FILE", help="Write all of it for programs.")
@click.option("--svg", "svg_file", metavar="FILE", help="Draw the graphs, cut into their parts.")
def plan(
    what: str,
    hosts: int,
    places: Sequence[str],
    batch: int | None,
    inference: bool,
    repeat: str | None,
    json_file: str | None,
    svg_file: str | None,
) -> None:
    """Say what a model's parameters are, and what a step sends between the hosts that its parts run on.

    It needs no job, and no memory for weights: the model is traced on tensors that have none.

    \b
    NAME    alexnet, inception, vgg16, lstm, gru, fcn5, gpt2; llama-70b, from one traced layer (needs transformers)
    SCRIPT  a Python file with two functions:
              def model(): return MyModel()                 # any module of torch
              def inputs(): return (torch.zeros(8, 784),)   # what it is called with; inputs(batch) for --batch
            and, if it likes, hosts = {"net.3": "worker:1"}, as tensorwire.torch.place takes them

    \b
    Examples:
      tensorwire plan vgg16
      tensorwire plan gpt2 --place blocks.6=worker:1 --place blocks.7=worker:1 --svg gpt2.svg
      tensorwire plan model.py --hosts 3 --json plan.json

    A module runs where the longest PATH says that names it or a module around it, others on worker:0. HOST is worker:0,
    worker:1 and so on. If nothing is said, the model is cut in the order of its layers, so that every host has as many
    bytes of parameters.
    """
    names = tuple(f"worker:{i}" for i in range(hosts))
    placement = dict(_pair("--place", place, "PATH=HOST") for place in places)
    times = None if repeat is None else _times(repeat)
    _check_files(json_file, svg_file)
    with interruptible(), progress("loading PyTorch") as tell:
        report = _report(what, names, placement, batch, times, inference=inference, tell=tell)
    report.show()
    if json_file is not None:
        save_file(json_file, report.json().encode(), option="--json")
    if svg_file is not None:
        save_file(svg_file, report.svg().encode(), option="--svg")


def _report(
    what: str,
    names: tuple[str, ...],
    placement: Mapping[str, str],
    batch: int | None,
    times: tuple[str, int] | None,
    *,
    inference: bool,
    tell: Tell,
) -> Report:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ArgumentError(f"tensorwire plan needs PyTorch: {how_to_install('torch')}") from None
    from tensorwire.cli.models import find_model
    from tensorwire.cli.plan_report import Report
    from tensorwire.torch.graph.draft import parameters, place, plans
    from tensorwire.torch.graph.survey import survey

    tell(f"making {what}")
    model = find_model(what, batch, times)
    said = placement or model.hosts
    wrong = sorted(set((said or {}).values()) - set(names))
    if wrong:
        raise ArgumentError(f"{wrong[0]!r} is none of the hosts, {', '.join(names)} (see --hosts)")
    tell(f"tracing {model.name}")
    found = survey(model.make, model.inputs, inference=inference)
    tell(f"planning what crosses between {len(names)} hosts")
    start = time.perf_counter()
    chosen = said or place(found, names, model.repeated)
    with warnings.catch_warnings(record=True) as warned:  # of tied parameters
        warnings.simplefilter("always")
        planned = plans(found, names, chosen, model.repeated)
    seconds = (found.seconds, time.perf_counter() - start)
    for warning in warned:
        click.echo(f"tensorwire: {warning.message}", err=True)
    return Report(model.name, parameters(found, model.repeated), chosen, not said, planned, seconds)


def _pair(option: str, given: str, form: str) -> tuple[str, str]:
    left, equals, right = given.rpartition("=")
    if not equals or not right:
        raise ArgumentError(f"{option} is {form}, not {given!r}")
    return left, right


def _times(given: str) -> tuple[str, int]:
    path, times = _pair("--repeat", given, "PATH=N")
    if not re.fullmatch("[1-9][0-9]{0,5}", times) or not re.fullmatch("[0-9]+", path.rpartition(".")[2]):
        raise ArgumentError(f"--repeat is the path of a numbered layer and how many there are, not {given!r}")
    return path, int(times)


def _check_files(json_file: str | None, svg_file: str | None) -> None:
    """Before minutes of work, not after."""
    for option, file in (("--json", json_file), ("--svg", svg_file)):
        if file is not None:
            check_file(file, option=option)
    if svg_file is not None and Path(svg_file).suffix.lower() != ".svg":
        raise ArgumentError(f"--svg {svg_file}: a drawing's name ends with .svg")
