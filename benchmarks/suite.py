"""What one call of ``python -m benchmarks`` does: the engine of ``tensorwire bench``, and more tables and charts."""

from __future__ import annotations

from functools import partial

from benchmarks import (
    diloco,
    edges,
    graphs,
    keys,
    modes,
    mxnet_training,
    remote,
    report,
    rows,
    stores,
    tensorflow_strategies,
    tensorflow_training,
    training,
    versions,
    writes,
)
from benchmarks import mxnet as mxnet_keys
from benchmarks import tensorflow as crossings
from benchmarks.options import Options as Options
from tensorwire.bench.compare import Settings
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes
from tensorwire.bench.suite import EDGE_ROUNDS, report_on
from tensorwire.charts.curves import plot_curves
from tensorwire.charts.figure import check_picture
from tensorwire.errors import ArgumentError

# What is measured, in how many rounds of how many seconds, in a whole run and in a quick one.
_STORE_PARTS = {
    "steps": (stores.measure, (5, 2), (1.0, 0.02)),
    "keys": (keys.measure, (5, 1), (1.0, 0.02)),
    "rows": (rows.measure, (5, 1), (1.0, 0.02)),
    "diloco": (diloco.measure, (2, 1), (0.0, 0.0)),
}
_TENSORFLOW_PARTS = {
    "crossings": (crossings.measure, (7, 1)),
    "networks": (tensorflow_training.measure, (3, 1)),
    "strategies": (tensorflow_strategies.measure, (3, 1)),
}


def device(options: Options) -> None:
    """``python -m benchmarks device``."""
    report_on(options, writes.measure)


def listen(options: Options) -> None:
    """The same with ``--listen``: serves the machine that measures."""
    remote.listen(options.connect)


def edge(options: Options) -> None:
    """``python -m benchmarks edge``."""
    report_on(options, edges.measure, rounds=EDGE_ROUNDS)


def store(options: Options) -> None:
    """``python -m benchmarks store``."""
    measure, rounds, seconds = _STORE_PARTS[options.part]
    if options.links and options.part not in ("steps", "diloco"):
        raise ArgumentError(f"--link goes with --part steps and diloco, not {options.part}")
    report_on(options, measure, rounds=rounds, seconds=seconds, shared=True)


def train(options: Options) -> None:
    """``python -m benchmarks train``."""
    check_report(options)
    records, described = report_on(options, training.measure, shared=True)
    steps(options, report.STEP_TITLE, records, described)


def graph(options: Options) -> None:
    """``python -m benchmarks graph``."""
    check_report(options)
    cuts: list[graphs.CutNote] = []
    records, described = report_on(options, partial(graphs.measure, cuts=cuts), rounds=(5, 2), shared=True)
    steps(options, graphs.STEP_TITLE, records, described)
    report.table(graphs.CROSSED_TITLE, graphs.CROSSED_HEAD, graphs.crossed_rows(records), markdown=options.markdown)
    report.table(graphs.CUT_TITLE, graphs.CUT_HEAD, cuts, markdown=options.markdown)


def convergence(options: Options) -> None:
    """``python -m benchmarks modes``."""
    check_report(options)
    curves: modes.Curves = {}
    report_on(options, partial(modes.measure, curves=curves), shared=True)
    if options.report:
        plot_curves(options.report, curves)


def mxnet(options: Options) -> None:
    """``python -m benchmarks mxnet``."""

    def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
        parts = {"pushpull": mxnet_keys.measure, "train": mxnet_training.measure}
        chosen = [part for name, part in parts.items() if options.part in (name, "all")]
        return [record for part in chosen for record in part(options, settings, notes)]

    mxnet_keys.find_python()
    report_on(options, measure, rounds=(5, 1), shared=True)


def tensorflow(options: Options) -> None:
    """``python -m benchmarks tensorflow``."""
    check_report(options)
    crossings.find_python()
    measure, rounds = _TENSORFLOW_PARTS[options.part]
    records, described = report_on(options, measure, rounds=rounds, shared=True)
    if options.part == "networks":
        steps(options, tensorflow_training.TITLE, records, described)


def weights(options: Options) -> None:
    """``python -m benchmarks versions``."""
    check_report(options)
    records, described = report_on(options, versions.measure, rounds=(5, 1), seconds=(0.5, 0.02), shared=True)
    if options.links:
        return
    report.table(versions.FIT_TITLE, versions.FIT_HEAD, versions.fits(records), markdown=options.markdown)
    if options.report:
        versions.chart(records, options.report, described)


def check_report(options: Options) -> None:
    """Raises `ArgumentError` for a picture that could not be drawn."""
    if options.report:
        check_picture(options.report, option="--report")


def steps(options: Options, title: str, records: list[Record], described: list[str]) -> None:
    """Where the time of steps went: a table, and a chart if one was asked for."""
    report.table(title, report.STEP_HEAD, report.step_rows(records), markdown=options.markdown)
    if options.report:
        report.chart(records, options.report, described)
