"""``store --part rows``: batches of random rows of a large table, pulled and pushed, beside a table on gRPC."""

from __future__ import annotations

from benchmarks import ACTORS
from benchmarks.actors.table_rows import BATCH, ROWS, WIDTH
from benchmarks.libraries import GRPC_ROWS, Libraries
from benchmarks.options import Options
from tensorwire.bench.compare import Settings, Workload, compare_all
from tensorwire.bench.programs import OURS, actor, job
from tensorwire.bench.records import Record, Target
from tensorwire.bench.show import Notes

_TARGETS = {"shm": Target(shares={"grpc": 5.0}), "tcp": Target(shares={"grpc": 3.0})}


def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """A pull and a push of a batch, over each device."""
    rows = 20_000 if options.quick else ROWS
    program = Libraries(options.peer_python, notes).program(GRPC_ROWS)
    made = [workload(device, rows, options.servers, program) for device in options.devices]
    return compare_all(made, settings, notes)


def workload(device: str, rows: int, servers: int = 1, peer: tuple[str, ...] = ()) -> Workload:
    """A table of so many rows. ``peer``: the command of gRPC's program, where that is here."""
    program, memory = actor("table_rows", ACTORS), 3 * rows * WIDTH * 4
    ours = job(OURS, program, rows, device, workers=1, servers=servers, memory=memory)
    environment = GRPC_ROWS.environment
    theirs = [job("grpc", peer, rows, workers=1, stopped=True, environment=environment)] if peer else []
    title = f"{device}, {BATCH} random rows of {rows} x {WIDTH}, pulled and pushed, rule sum, async"
    nbytes = 2 * BATCH * WIDTH * 4  # there and back
    return Workload("store", device, title, nbytes, "rows", (ours, *theirs), ("grpc",), _TARGETS[device])
