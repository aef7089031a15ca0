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
from tensorwire.graph.ir import worker_name
from tensorwire.observe.files import check_file, save_file
from tensorwire.progress import Report, progress

if TYPE_CHECKING:
    from tensorwire.cli.plan.store_memory import StoreMemory
    from tensorwire.cli.plan.summary import Summary

DTYPES = ("float32", "bfloat16", "float16")


@click.command(short_help="Say what a model would send between workers.")
@click.argument("what", metavar="NAME|SCRIPT")
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="How many the model is cut over, or train.",
)
@click.option("--place", "places", multiple=True, metavar="PATH=RANK", help="The worker that runs a module: net.3=1.")
@click.option("--batch", type=click.IntRange(1, 2**30), metavar="N", help="Samples a step; else what the model says.")
@click.option("--inference", is_flag=True, help="No gradients.")
@click.option("--store", is_flag=True, help="Plan a store of the parameters, instead of a model that is cut.")
@click.option("--device", is_flag=True, help="With --store: the memory saved on each device, and the copies of a step.")
@click.option("--optimizer", metavar="NAME,KEY=VALUE", help="With --store: such as SGD,momentum=0.9.  [default: AdamW]")
@click.option("--dtype", type=click.Choice(DTYPES), help="With --store: of the parameters; else what the model says.")
@click.option("--servers", type=click.IntRange(1, 512), help="With --store: how many have it.  [default: 1]")
@click.option("--json", "json_file", metavar="FILE", help="Write all of it for programs.")
@click.option("--plot", metavar="PICTURE", help="Draw the graphs, cut into their parts; a .png, .svg or .pdf.")
def plan(
    what: str,
    workers: int,
    places: Sequence[str],
    batch: int | None,
    inference: bool,
    json_file: str | None,
    plot: str | None,
    store: bool,
    device: bool,
    optimizer: str | None,
    dtype: str | None,
    servers: int | None,
) -> None:
    """Say what a model's parameters are, and what a step sends between the workers that its parts run on.

    It needs no job, and no memory for weights: the model is traced on tensors that have none.

    \b
    NAME    alexnet, inception, vgg16, lstm, gru, fcn5, gpt2; llama-70b (needs transformers, and a minute)
    SCRIPT  a Python file with two functions:
              def model(): return MyModel()                 # any module of torch
              def inputs(): return (torch.zeros(8, 784),)   # what it is called with; inputs(batch) for --batch
            and, if it likes, workers = {"net.3": 1}, as tensorwire.torch.place takes them

    \b
    Examples:
      tensorwire plan vgg16
      tensorwire plan gpt2 --place blocks.6=1 --place blocks.7=1 --plot gpt2.png
      tensorwire plan model.py --workers 3 --json plan.json
      tensorwire plan gpt2 --store --device --dtype bfloat16     # memory that a store takes, and saves on a GPU

    The longest PATH that names a module, or a module around it, decides which worker runs it; worker 0 runs the others.
    RANK is the worker's number, from 0. Without any PATH, the model is cut in the order of its layers, so that all
    workers have about as many bytes of parameters.
    """
    cut_alone = {"place": places, "batch": batch, "inference": inference, "plot": plot}
    _check_options(
        cut_alone if store else {"device": device, "optimizer": optimizer, "dtype": dtype, "servers": servers},
        store=store,
    )
    if workers == 1 and not store:
        raise ArgumentError("--workers 1: a model is cut over two or more; with --store, one may train")
    placement = dict(map(_place, places))
    if json_file is not None:  # before minutes of work, not after
        check_file(json_file, option="--json")
    if plot is not None:
        check_picture(plot, option="--plot")
    found: Summary | StoreMemory
    with interruptible(), progress("loading PyTorch") as report:
        _check_torch()
        if store:
            from tensorwire.cli.plan.store_memory import store_memory

            report(f"making {what}")
            chosen = optimizer or "AdamW"
            found = store_memory(what, chosen, servers=servers or 1, workers=workers, dtype=dtype, device=device)
        else:
            found = _summary(what, workers, placement, batch, inference=inference, report=report)
    found.show()
    if json_file is not None:
        save_file(json_file, found.json().encode(), option="--json")
    if plot is not None:
        from tensorwire.cli.plan.drawing import plot_plans
        from tensorwire.cli.plan.summary import Summary

        assert isinstance(found, Summary)
        plot_plans(plot, found.name, found.planned, option="--plot")


def _check_options(others: Mapping[str, object], *, store: bool) -> None:
    """Raises `ArgumentError` where one of the ``others``, which do not go with what is planned, was given."""
    for name, value in others.items():
        if value not in (None, False, ()):
            raise ArgumentError(f"--{name} does not go with --store" if store else f"--{name} needs --store")


def _check_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ArgumentError(f"tensorwire plan needs PyTorch: {how_to_install('torch')}") from None


def _summary(
    what: str, workers: int, placement: Mapping[str, int | str], batch: int | None, *, inference: bool, report: Report
) -> Summary:
    from tensorwire.cli.plan.catalog import find_model
    from tensorwire.cli.plan.cut import cut
    from tensorwire.cli.plan.summary import Summary
    from tensorwire.torch.graph.placement.placed_models import rank_of
    from tensorwire.torch.graph.planning.plan_model import plan_model
    from tensorwire.torch.graph.planning.trace_model import trace_model

    report(f"making {what}")
    model = find_model(what, batch)
    given = {path: rank_of(worker) for path, worker in (placement or model.workers or {}).items()}
    last = max(given.values(), default=0)
    if last >= workers:
        raise ArgumentError(f"there is no worker {last}: give ranks below {workers}, or more --workers")
    report(f"tracing {model.name}")
    found = trace_model(model.make, model.inputs, inference=inference)
    report(f"planning what crosses between {workers} workers")
    start = time.perf_counter()
    chosen = given or cut(found.layers(), workers)
    with warnings.catch_warnings(record=True) as warned:  # of tied parameters
        warnings.simplefilter("always")
        planned = plan_model(found, workers, chosen)
    seconds = (found.seconds, time.perf_counter() - start)
    for warning in warned:
        click.echo(f"tensorwire: {warning.message}", err=True)
    named = {path: worker_name(rank) for path, rank in chosen.items()}
    return Summary(model.name, found.parameters, named, not given, planned, seconds)


def _place(given: str) -> tuple[str, int | str]:
    path, equals, worker = given.rpartition("=")
    if not equals or not worker:
        raise ArgumentError(f"--place takes PATH=RANK, not {given!r}")
    return path, int(worker) if worker.isdecimal() else worker
