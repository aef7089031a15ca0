"""What one call of ``tensorwire bench`` does, from its options to the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tensorwire.bench import edges, faults, graphs, idle, links, machine, report, show, stores, training, verbs, writes
from tensorwire.bench.baselines import Peers
from tensorwire.bench.compare import Settings, Workload, compare_all
from tensorwire.bench.programs import end_all
from tensorwire.bench.records import Record
from tensorwire.errors import Unsupported
from tensorwire.observe.files import check_file


@dataclass(frozen=True)
class Options:
    """What the user asked for; None and empty: the default of the benchmark."""

    devices: tuple[str, ...] = ("shm", "tcp")
    sizes: tuple[int, ...] = ()
    rounds: int | None = None
    quick: bool = False
    peers: tuple[str, ...] = ()
    peer_python: str | None = None
    links: tuple[str, ...] = ()
    waiting: bool = False
    connect: str = ""
    cores: str | None = None
    json: str | None = None
    markdown: bool = False
    workloads: tuple[str, ...] = ()
    workers: int = 2
    servers: int = 1
    steps: int = 3
    overlap: bool = False
    report: str = ""
    hosts: int = 2
    modes: tuple[str, ...] = ()


def device(options: Options) -> None:
    """``tensorwire bench device``."""
    _report(options, _device)


def edge(options: Options) -> None:
    """``tensorwire bench edge``."""
    _report(options, _edge)


def posting(options: Options) -> None:
    """``tensorwire bench posting``."""
    _report(options, _posting)


def fault(options: Options) -> None:
    """``tensorwire bench faults``."""
    _report(options, _faults)


def store(options: Options) -> None:
    """``tensorwire bench store``."""
    _report(options, _store, shared=True)


def train(options: Options) -> None:
    """``tensorwire bench train``."""
    if options.report:
        report.check_chart(options.report)
    records, described = _report(options, _train, shared=True)
    tell = report.markdown if options.markdown else report.show
    tell(report.STEP_TITLE, report.STEP_HEAD, report.step_rows(records))
    if options.report:
        tell(report.SIZES_TITLE, report.SIZES_HEAD, report.size_rows())
        report.chart(records, options.report, described)


def graph(options: Options) -> None:
    """``tensorwire bench graph``."""
    if options.report:
        report.check_chart(options.report)
    told: list[graphs.Told] = []
    records, described = _report(options, partial(_graph, told), shared=True)
    tell = report.markdown if options.markdown else report.show
    tell(graphs.STEP_TITLE, report.STEP_HEAD, report.step_rows(records))
    tell(graphs.CROSSED_TITLE, graphs.CROSSED_HEAD, graphs.crossed_rows(records))
    tell(graphs.CUT_TITLE, graphs.CUT_HEAD, graphs.cut_rows(told))
    if options.report:
        report.chart(records, options.report, described)


def _report(
    options: Options, measure: Callable[[Options, Settings, show.Notes], list[Record]], *, shared: bool = False
) -> tuple[list[Record], list[str]]:
    """Measures, then shows; what was measured is written even if nobody can look at the table.

    ``shared``: programs are not pinned each to a processor of its own.
    """
    if "verbs" in options.devices:
        verbs.check()
    settings = Settings(
        rounds=options.rounds or (2 if options.quick else 9),
        seconds=0.02 if options.quick else 0.2,
        cores=(machine.all_cores if shared else machine.choose_cores)(options.cores),
    )
    if options.json is not None:
        check_file(options.json, option="--json")
    described, busy = machine.describe(settings.cores, shared=shared), machine.is_busy()  # before our own load
    try:
        with show.notes() as notes:
            records = measure(options, settings, notes)
    finally:
        end_all()
    if busy:
        records = [record.unjudged() for record in records]
    if options.json is not None:
        show.write_json(options.json, records, described)
    if options.markdown:
        print(show.markdown(records, described))
    else:
        show.table(records, described)
    return records, described


def _device(options: Options, settings: Settings, notes: show.Notes) -> list[Record]:
    records: list[Record] = []
    if options.waiting:
        seconds = 0.3 if options.quick else 2.0
        records += idle.measure(options.devices, _at_most(settings, 3), seconds, notes)
    long = replace(_at_most(settings, 3), seconds=0.3 if options.quick else 3.0)
    for rate in options.links:
        records += _over_link(rate, links.workloads, long, notes)
    if options.waiting or options.links:
        return records
    peers = Peers(options.peers, options.peer_python, notes)
    others = [device for device in options.devices if device != "verbs"]
    records += compare_all(writes.workloads(others, options.sizes, peers, quick=options.quick), settings, notes)
    if "verbs" in options.devices:
        made = verbs.workloads(options.sizes, verbs.Ends(options.connect), notes, quick=options.quick)
        # perftest begins and ends within its figure, too: what that costs is to be little.
        records += compare_all(made, replace(settings, seconds=0.1 if options.quick else 1.0), notes)
    return records


def _over_link(
    rate: str,
    workloads: Callable[[str, tuple[str, str]], list[Workload]],
    settings: Settings,
    notes: show.Notes,
) -> list[Record]:
    try:
        with links.cable(rate) as names:
            return compare_all(workloads(rate, names), settings, notes)
    except Unsupported as error:
        notes.skip(f"--link {rate}: {error}")
        return []


def _edge(options: Options, settings: Settings, notes: show.Notes) -> list[Record]:
    settings = replace(settings, rounds=options.rounds or (2 if options.quick else 5))
    peers = Peers((), options.peer_python, notes)
    names = [name for name in options.peers if name != "none"]
    records: list[Record] = []
    for nbytes in options.sizes or (edges.QUICK_SIZES if options.quick else edges.SIZES):
        made = edges.workloads(options.devices, nbytes, peers, names)
        records += compare_all(made, _at_most(settings, 3) if nbytes >= edges.LARGE else settings, notes)
    return records


def _faults(options: Options, settings: Settings, notes: show.Notes) -> list[Record]:
    rounds = options.rounds or (2 if options.quick else 20)
    return faults.measure(options.devices, replace(settings, rounds=rounds), notes, quick=options.quick)


def _train(options: Options, settings: Settings, notes: show.Notes) -> list[Record]:
    made = {
        "workers": options.workers,
        "servers": options.servers,
        "peers": options.peers,
        "overlap": options.overlap,
        "course": training.Course(settings.rounds, options.steps),
        "shrink": training.QUICK_SHRINK if options.quick else 1,
    }
    return training.measure(options.workloads, options.devices, options.links, made, notes)


def _graph(told: list[graphs.Told], options: Options, settings: Settings, notes: show.Notes) -> list[Record]:
    made = {
        "hosts": options.hosts,
        "modes": options.modes,
        "course": training.Course(options.rounds or (2 if options.quick else 5), options.steps),
        "shrink": training.QUICK_SHRINK if options.quick else 1,
    }
    return graphs.measure(options.workloads, options.devices, made, told, notes)


def _posting(options: Options, settings: Settings, notes: show.Notes) -> list[Record]:
    from tensorwire.bench import posting  # it takes the place of this process's NIC

    return posting.measure(settings)


def _store(options: Options, settings: Settings, notes: show.Notes) -> list[Record]:
    rounds = options.rounds or (2 if options.quick else 5)
    settings = replace(settings, rounds=rounds, seconds=0.02 if options.quick else 1.0)
    peers = Peers((), options.peer_python, notes)
    records: list[Record] = []
    for job in stores.jobs(options.workloads, options.workers, options.servers):
        for rate in options.links:
            made = partial(stores.over_link, job.model)
            records += _over_link(rate, made, replace(settings, seconds=0.02 if options.quick else 3.0), notes)
        if not options.links:
            grpc = "grpc" in options.peers
            records += compare_all(stores.workloads(job, options.devices, peers, grpc=grpc), settings, notes)
    if "1gbit" in options.links and records:
        notes.say(stores.GIGABIT)
    return records


def _at_most(settings: Settings, rounds: int) -> Settings:
    return replace(settings, rounds=min(settings.rounds, rounds))
