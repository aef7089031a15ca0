"""One call of a benchmark, from its options to the table; and the five of ``tensorwire bench``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from tensorwire.bench import edges, faults, machine, show, writes
from tensorwire.bench.compare import Settings, Workload, compare_all
from tensorwire.bench.limits import Limits
from tensorwire.bench.programs import end_all
from tensorwire.bench.records import Record
from tensorwire.device import VerbsDevice
from tensorwire.device.copy_choice import measure_copy
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
    cores: str | None = None
    json: str | None = None
    markdown: bool = False
    workloads: tuple[str, ...] = ()
    workers: int = 2
    servers: int = 1


Asked = TypeVar("Asked", bound=Options)


def report_on(
    options: Asked,
    measure: Callable[[Asked, Settings, show.Notes], list[Record]],
    *,
    rounds: tuple[int, int] = (9, 2),
    seconds: tuple[float, float] = (0.2, 0.02),
    shared: bool = False,
) -> tuple[list[Record], list[str]]:
    """Measures, then shows; returns the records and what the machine is.

    What was measured is written even if nobody can look at the table. ``rounds`` and ``seconds`` of a round are those
    of a whole and of a quick run. ``shared``: programs are not pinned each to a processor of its own.

    Raises `VerbsUnavailable` where that device is asked for and there is no RDMA.
    """
    if "verbs" in options.devices:
        VerbsDevice().close()  # where there is no RDMA, this says so
    settings = Settings(
        rounds=options.rounds or rounds[options.quick],
        seconds=seconds[options.quick],
        cores=machine.choose_cores(options.cores, shared=shared),
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


def device(options: Options) -> None:
    """``tensorwire bench device``."""
    report_on(
        options,
        lambda asked, settings, notes: compare_all(
            writes.workloads(asked.devices, asked.sizes, Limits(notes), quick=asked.quick), settings, notes
        ),
    )


def edge(options: Options) -> None:
    """``tensorwire bench edge``."""

    def measure(options: Options, settings: Settings, notes: show.Notes) -> list[Record]:
        limits = Limits(notes)
        return stream(options, settings, notes, lambda nbytes: edges.workloads(options.devices, nbytes, limits))

    report_on(options, measure, rounds=EDGE_ROUNDS)


EDGE_ROUNDS = (5, 2)


def stream(
    options: Options, settings: Settings, notes: show.Notes, workloads: Callable[[int], list[Workload]]
) -> list[Record]:
    """Measures the ``workloads`` of edges, size by size: large ones in fewer rounds."""
    records: list[Record] = []
    for nbytes in options.sizes or (edges.QUICK_SIZES if options.quick else edges.SIZES):
        few = replace(settings, rounds=min(settings.rounds, 3))
        records += compare_all(workloads(nbytes), few if nbytes >= edges.LARGE else settings, notes)
    return records


def fault(options: Options) -> None:
    """``tensorwire bench faults``."""
    report_on(options, faults.measure, rounds=(20, 2))


def store(options: Options) -> None:
    """``tensorwire bench store``."""
    from tensorwire.bench.stores import workloads  # it imports torch

    measure = partial(update, workloads=workloads)
    report_on(options, measure, rounds=(5, 2), seconds=(1.0, 0.02), shared=True)


def update(
    options: Options,
    settings: Settings,
    notes: show.Notes,
    workloads: Callable[[StoreJob, Sequence[str]], list[Workload]],
) -> list[Record]:
    """Measures the ``workloads`` of stores, model by model."""
    from tensorwire.bench.stores import StoreJob
    from tensorwire.models import find

    made = [StoreJob(find(name), options.workers, options.servers) for name in options.workloads]
    return [record for job in made for record in compare_all(workloads(job, options.devices), settings, notes)]


def versions(options: Options) -> None:
    """``tensorwire bench versions``."""
    from tensorwire.bench.weights import workloads  # it imports torch

    def measure(options: Options, settings: Settings, notes: show.Notes) -> list[Record]:
        made = workloads(options.devices, Limits(notes), notes, quick=options.quick)
        return [with_pause(record) for record in compare_all(made, settings, notes)]

    report_on(options, measure, rounds=(5, 2), seconds=(0.5, 0.02), shared=True)


def files(options: Options) -> None:
    """``tensorwire bench files``."""
    from tensorwire.bench.job_files import workloads  # it imports torch

    def measure(options: Options, settings: Settings, notes: show.Notes) -> list[Record]:
        return compare_all(workloads(options.devices, Limits(notes), notes, quick=options.quick), settings, notes)

    report_on(options, measure, rounds=(5, 2), seconds=(0.5, 0.02), shared=True)


def with_pause(record: Record) -> Record:
    """``record``; where it is a reader's pause, with that and its own copy in the details."""
    if record.mode != "commit" or record.limit_value is None:
        return record
    return replace(record, details={"pause": record.seconds, "copy": record.limit_value})
