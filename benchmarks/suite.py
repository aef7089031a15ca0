"""What one call of ``python -m benchmarks`` does, from its options to the tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from benchmarks import (
    edges,
    graphs,
    modes,
    mxnet_kills,
    mxnet_paper,
    mxnet_training,
    report,
    stores,
    tensorflow_strategies,
    tensorflow_training,
    training,
    writes,
)
from benchmarks import mxnet as mxnet_keys
from benchmarks import tensorflow as crossings
from benchmarks.libraries import Libraries
from benchmarks.mxnet_jobs import everywhere, find_python
from tensorwire.bench import local_training, suite
from tensorwire.bench.compare import Settings, compare_all
from tensorwire.bench.limits import Limits
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes, notes
from tensorwire.bench.suite import report_on
from tensorwire.charts.bars import plot_bars
from tensorwire.charts.curves import plot_curves
from tensorwire.charts.figure import check_picture
from tensorwire.errors import ArgumentError


@dataclass(frozen=True)
class Options(suite.Options):
    """What the user asked for; None and empty: the default of the benchmark."""

    peers: tuple[str, ...] = ()
    peer_python: str | None = None
    steps: int = 3
    overlap: bool = False
    report: str = ""
    workers: int = 2
    modes: tuple[str, ...] = ()
    datas: tuple[str, ...] = ()
    seconds: float = 20.0
    width: int = 256
    counts: tuple[int, ...] = ()

    @property
    def shrink(self) -> int:
        """What divides the models' hidden sizes."""
        return training.QUICK_SHRINK if self.quick else 1


def device(options: Options) -> None:
    """``python -m benchmarks device``."""
    report_on(options, _device)


def edge(options: Options) -> None:
    """``python -m benchmarks edge``."""
    report_on(options, _edge)


def store(options: Options) -> None:
    """``python -m benchmarks store``."""
    report_on(options, _store, shared=True)


def train(options: Options) -> None:
    """``python -m benchmarks train``."""
    if options.report:
        check_picture(options.report, option="--report")
    records, described = report_on(options, _train, shared=True)
    print_table = report.markdown if options.markdown else report.show
    print_table(report.STEP_TITLE, report.STEP_HEAD, report.step_rows(records))
    if options.report:
        print_table(report.SIZES_TITLE, report.SIZES_HEAD, report.size_rows())
        report.chart(records, options.report, described)


def graph(options: Options) -> None:
    """``python -m benchmarks graph``."""
    if options.report:
        check_picture(options.report, option="--report")
    cuts: list[graphs.CutNote] = []
    records, described = report_on(options, partial(_graph, cuts), shared=True)
    print_table = report.markdown if options.markdown else report.show
    print_table(graphs.STEP_TITLE, report.STEP_HEAD, report.step_rows(records))
    print_table(graphs.CROSSED_TITLE, graphs.CROSSED_HEAD, graphs.crossed_rows(records))
    print_table(graphs.CUT_TITLE, graphs.CUT_HEAD, graphs.cut_rows(cuts))
    if options.report:
        report.chart(records, options.report, described)


def convergence(options: Options) -> None:
    """``python -m benchmarks modes``."""
    if options.report:
        check_picture(options.report, option="--report")
    trained: list[modes.Trainings] = []
    report_on(options, partial(_convergence, trained), shared=True)
    if options.report:
        plot_curves(options.report, trained[0].curves)


def mxnet(options: Options) -> None:
    """``python -m benchmarks mxnet``."""
    if options.report:
        check_picture(options.report, option="--report")
    python = find_python()
    print_table = report.markdown if options.markdown else report.show
    if options.part == "kill":
        with notes() as said:
            found = mxnet_kills.rows(python, 4.0 if options.quick else mxnet_kills.PATIENCE, said)
        print_table(mxnet_kills.TITLE, mxnet_kills.HEAD, found)
        return
    epochs: list[mxnet_paper.Epoch] = []
    _, described = report_on(options, partial(_mxnet, epochs), shared=True)
    if not epochs:
        return
    print_table(mxnet_paper.TITLE, mxnet_paper.HEAD, mxnet_paper.rows(epochs))
    if options.report:
        caption = "\n".join(described)
        plot_bars(options.report, mxnet_paper.bars(epochs), cases="workers", unit="seconds per epoch", caption=caption)


def _mxnet(epochs: list[mxnet_paper.Epoch], options: Options, settings: Settings, notes: Notes) -> list[Record]:
    settings = replace(settings, rounds=options.rounds or (1 if options.quick else 5))
    found: list[Record] = []
    if options.part != "train":
        sizes = options.sizes or (mxnet_keys.QUICK_SIZES if options.quick else mxnet_keys.SIZES)
        keys = partial(mxnet_keys.measure, devices=options.devices, sizes=sizes, settings=settings, notes=notes)
        found += everywhere(options.counts or (1,), options.links, notes, keys)
    if options.part != "pushpull":
        course = mxnet_training.Course(settings.rounds, options.steps, options.shrink)
        devices = ("tcp",) if options.links else options.devices
        trained = partial(
            mxnet_training.measure, epochs, devices=devices, course=course, cores=settings.cores, notes=notes
        )
        found += everywhere(options.counts or (1, 2), options.links, notes, trained)
    return found


def tensorflow(options: Options) -> None:
    """``python -m benchmarks tensorflow``."""
    if options.report:
        check_picture(options.report, option="--report")
    crossings.find_python()
    parts = {"crossings": _tensorflow, "networks": _networks, "strategies": _strategies}
    records, described = report_on(options, parts[options.part], shared=True)
    if options.part != "networks":
        return
    print_table = report.markdown if options.markdown else report.show
    print_table(tensorflow_training.TITLE, report.STEP_HEAD, report.step_rows(records))
    if options.report:
        report.chart(records, options.report, described)


def _tensorflow(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    settings = replace(settings, rounds=options.rounds or (1 if options.quick else 7))
    sizes = options.sizes or (crossings.QUICK_SIZES if options.quick else crossings.SIZES)
    return crossings.measure(options.devices, sizes, settings, notes, quick=options.quick)


def _networks(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    return _whole_steps(tensorflow_training.measure, options, settings, notes)


def _strategies(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    return _whole_steps(tensorflow_strategies.measure, options, settings, notes)


def _whole_steps(
    measure: Callable[..., list[Record]], options: Options, settings: Settings, notes: Notes
) -> list[Record]:
    course = training.Course(options.rounds or (1 if options.quick else 3), options.steps)
    return measure(options.workloads, options.devices, options.shrink, course, cores=settings.cores, notes=notes)


def _convergence(trained: list[modes.Trainings], options: Options, settings: Settings, notes: Notes) -> list[Record]:
    seconds = 3.0 if options.quick else options.seconds
    device = options.devices[0]
    found = modes.measure(options.datas, options.modes, device, seconds=seconds, width=options.width, notes=notes)
    trained.append(found)
    return found.records


def _device(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    libraries = Libraries(options.peer_python, notes)
    made = writes.workloads(
        options.devices, options.sizes, Limits(notes), libraries, options.peers, quick=options.quick
    )
    return compare_all(made, settings, notes)


def _edge(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    libraries = Libraries(options.peer_python, notes)
    made = partial(edges.workloads, limits=Limits(notes), libraries=libraries, names=options.peers)
    return suite.stream(options, settings, notes, made)


def _store(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    libraries = Libraries(options.peer_python, notes)
    if options.part == "diloco":
        if not options.links:
            raise ArgumentError("--part diloco needs --link, such as 1gbit")
        peers = partial(stores.diloco, libraries)
        return suite.local(options, settings, notes, partial(local_training.measure, peers=peers))
    if options.part != "steps":
        settings = replace(settings, rounds=options.rounds or (1 if options.quick else 5))
        rows = partial(stores.rows, quick=options.quick)
        made = (stores.pushes if options.part == "pushes" else rows)(options.devices, libraries)
        return compare_all(made, settings, notes)
    return suite.update(options, settings, notes, partial(stores.workloads, libraries=libraries))


def _train(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    made = {
        "workers": options.workers,
        "servers": options.servers,
        "peers": options.peers,
        "overlap": options.overlap,
        "course": training.Course(settings.rounds, options.steps),
        "shrink": options.shrink,
    }
    return training.measure(options.workloads, options.devices, options.links, made, notes)


def _graph(cuts: list[graphs.CutNote], options: Options, settings: Settings, notes: Notes) -> list[Record]:
    made = {
        "workers": options.workers,
        "modes": options.modes,
        "course": training.Course(options.rounds or (2 if options.quick else 5), options.steps),
        "shrink": options.shrink,
    }
    return graphs.measure(options.workloads, options.devices, made, cuts, notes)
