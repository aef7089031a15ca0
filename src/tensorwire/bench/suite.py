"""One call of ``tensorwire bench``, from its options to the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from tensorwire.bench import edges, faults, links, machine, show, verbs, writes
from tensorwire.bench.compare import Settings, Workload, compare_all
from tensorwire.bench.limits import Limits
from tensorwire.bench.programs import end_all
from tensorwire.bench.records import Record
from tensorwire.device.copy_choice import measure_copy
from tensorwire.errors import Unsupported
from tensorwire.observe.files import check_file

if TYPE_CHECKING:
    from tensorwire.bench.stores import StoreJob


@dataclass(frozen=True)
class Options:
    """What the user asked for; None and empty: the default of the benchmark."""

    devices: tuple[str, ...] = ("shm", "tcp")
    sizes: tuple[int, ...] = ()
    rounds: int | None = None
    quick: bool = False
    links: tuple[str, ...] = ()
    connect: str = ""
    cores: str | None = None
    json: str | None = None
    markdown: bool = False
    workloads: tuple[str, ...] = ()
    workers: int = 2
    servers: int = 1
    part: str = "steps"


Asked = TypeVar("Asked", bound=Options)


def device(options: Options) -> None:
    """``tensorwire bench device``."""
    report_on(options, _device)


def edge(options: Options) -> None:
    """``tensorwire bench edge``."""
    report_on(options, _edge)


def fault(options: Options) -> None:
    """``tensorwire bench faults``."""
    report_on(options, _faults)


def store(options: Options) -> None:
    """``tensorwire bench store``."""
    report_on(options, _store, shared=True)


def report_on(
    options: Asked, measure: Callable[[Asked, Settings, show.Notes], list[Record]], *, shared: bool = False
) -> tuple[list[Record], list[str]]:
    """Measures, then shows; returns the records and what the machine is.

    What was measured is written even if nobody can look at the table.
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
    measure_copy()
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
    long = replace(at_most(settings, 3), seconds=0.3 if options.quick else 3.0)
    records = [record for rate in options.links for record in _over_link(rate, links.workloads, long, notes)]
    if options.links:
        return records
    others = [device for device in options.devices if device != "verbs"]
    records += compare_all(writes.workloads(others, options.sizes, Limits(notes), quick=options.quick), settings, notes)
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
    return _on_cable(rate, notes, lambda names: compare_all(workloads(rate, names), settings, notes))


def _on_cable(rate: str, notes: show.Notes, measure: Callable[[tuple[str, str]], list[Record]]) -> list[Record]:
    try:
        with links.cable(rate) as names:
            return measure(names)
    except Unsupported as error:
        notes.skip(f"--link {rate}: {error}")
        return []


def _edge(options: Options, settings: Settings, notes: show.Notes) -> list[Record]:
    return stream(options, settings, notes, partial(edges.workloads, limits=Limits(notes)))


def stream(
    options: Options,
    settings: Settings,
    notes: show.Notes,
    workloads: Callable[[Sequence[str], int], list[Workload]],
) -> list[Record]:
    """Measures the ``workloads`` of edges, size by size: large ones in fewer rounds."""
    settings = replace(settings, rounds=options.rounds or (2 if options.quick else 5))
    records: list[Record] = []
    for nbytes in options.sizes or (edges.QUICK_SIZES if options.quick else edges.SIZES):
        made = workloads(options.devices, nbytes)
        records += compare_all(made, at_most(settings, 3) if nbytes >= edges.LARGE else settings, notes)
    return records


def _faults(options: Options, settings: Settings, notes: show.Notes) -> list[Record]:
    rounds = options.rounds or (2 if options.quick else 20)
    return faults.measure(options.devices, replace(settings, rounds=rounds), notes, quick=options.quick)


def _store(options: Options, settings: Settings, notes: show.Notes) -> list[Record]:
    from tensorwire.bench import stores  # it imports torch

    if options.part != "steps":
        return _modes(options, replace(settings, rounds=options.rounds or (1 if options.quick else 5)), notes)
    if not options.links:
        return update(options, settings, notes, stores.workloads)
    settings = replace(settings, rounds=options.rounds or (2 if options.quick else 5))
    long = replace(settings, seconds=0.02 if options.quick else 3.0)
    jobs = stores.jobs(options.workloads, options.workers, options.servers)
    cables = [(partial(stores.over_link, job.model), rate) for job in jobs for rate in options.links]
    return [record for made, rate in cables for record in _over_link(rate, made, long, notes)]


def _modes(options: Options, settings: Settings, notes: show.Notes) -> list[Record]:
    """The parts about training modes."""
    from tensorwire.bench import key_modes, local_training, row_batches, unequal

    quick = options.quick
    if options.part == "keys":
        made = key_modes.workloads(options.workloads, options.devices, options.workers, options.servers, quick=quick)
        return compare_all(made, replace(settings, seconds=0.02 if quick else 1.0), notes)
    if options.part == "rows":
        made = row_batches.workloads(options.devices, options.servers, quick=quick)
        return compare_all(made, replace(settings, seconds=0.02 if quick else 1.0), notes)
    if options.part == "unequal":
        settings = replace(settings, seconds=0.3 if quick else 6.0)
        return unequal.measure(options.workloads, options.devices, settings, notes)
    return local(options, settings, notes, local_training.measure)


def local(
    options: Options, settings: Settings, notes: show.Notes, measure: Callable[..., list[Record]]
) -> list[Record]:
    """``measure`` for each model on each link, as `local_training.measure`."""
    from tensorwire.bench import stores

    settings = at_most(settings, 2)
    jobs = stores.jobs(options.workloads, options.workers, options.servers)
    cables = [(job.model, rate) for job in jobs for rate in options.links]
    made = partial(measure, settings=settings, notes=notes, quick=options.quick)
    return [record for model, rate in cables for record in _on_cable(rate, notes, partial(made, model, rate))]


def update(
    options: Options,
    settings: Settings,
    notes: show.Notes,
    workloads: Callable[[StoreJob, Sequence[str]], list[Workload]],
) -> list[Record]:
    """Measures the ``workloads`` of stores, model by model."""
    from tensorwire.bench.stores import jobs as make_jobs

    rounds = options.rounds or (2 if options.quick else 5)
    settings = replace(settings, rounds=rounds, seconds=0.02 if options.quick else 1.0)
    jobs = make_jobs(options.workloads, options.workers, options.servers)
    return [record for job in jobs for record in compare_all(workloads(job, options.devices), settings, notes)]


def at_most(settings: Settings, rounds: int) -> Settings:
    """``settings`` of no more rounds than that."""
    return replace(settings, rounds=min(settings.rounds, rounds))
