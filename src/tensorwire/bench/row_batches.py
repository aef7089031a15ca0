"""``bench store --part rows``: batches of random rows of a large table, pulled and pushed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from tensorwire.bench.actors.table_rows import BATCH, ROWS, WIDTH
from tensorwire.bench.compare import Workload
from tensorwire.bench.programs import OURS, Contender, actor

BATCH_BYTES = 2 * BATCH * WIDTH * 4  # there and back


def workloads(devices: Sequence[str], servers: int, *, quick: bool) -> list[Workload]:
    """A pull and a push of a batch, over each device."""
    rows = 20_000 if quick else ROWS
    made = []
    for device in devices:
        arguments = (rows, 1, servers, device, "127.0.0.1")
        commands = [actor("table_rows", "server", i, *arguments) for i in range(servers)]
        commands.append(actor("table_rows", "worker", 0, *arguments))
        secret = {"TENSORWIRE_SECRET": secrets.token_hex(32)}
        ours = Contender(OURS, tuple(commands), servers=servers, environment=secret, memory=3 * rows * WIDTH * 4)
        title = f"{device}, {BATCH} random rows of {rows} x {WIDTH}, pulled and pushed, rule sum, async"
        made.append(Workload("store", device, title, BATCH_BYTES, "rows", (ours,)))
    return made
