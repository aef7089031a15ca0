"""``bench store --part diloco --link RATE``: DiLoCo over a slow link, beside a step of sync on the same link.

A step's computation is a sleep of a stated length, as if an accelerator computed. What of a step is not computation is
exposed communication: the time that ``step()`` takes.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import replace

from tensorwire.bench import links
from tensorwire.bench.actors.paced import EVERY
from tensorwire.bench.compare import Samples, Settings, Workload, records
from tensorwire.bench.models import Model
from tensorwire.bench.programs import OURS, Contender, Stage, actor
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes

# Milliseconds that a step computes: about what it took in `python -m benchmarks train`. At 100 Mbit/s it is
# ten times as long, as if batches were larger: shorter steps than an exchange takes could not hide it.
COMPUTE = {"gpt2": 1000.0}
OTHERS = 500.0
SLOW = "100mbit"
QUICK_COMPUTE = 20.0
EXPOSED = 0.02
SYNC = f"{OURS}, sync"
_SYNC_STEPS = 2
Peers = Callable[[Model, float, tuple[str, str]], list[Contender]]


def _no_peers(model: Model, compute: float, names: tuple[str, str]) -> list[Contender]:
    return []


def measure(
    model: Model,
    rate: str,
    names: tuple[str, str],
    *,
    settings: Settings,
    notes: Notes,
    quick: bool,
    peers: Peers = _no_peers,
) -> list[Record]:
    """DiLoCo and sync in turns, and ``peers`` with them; DiLoCo warms up by ``EVERY`` steps, and a round has as many.

    ``peers(model, compute, names)``: programs of other libraries that do the same.
    """
    compute = QUICK_COMPUTE if quick else COMPUTE.get(model.name, OTHERS) * (10 if rate == SLOW else 1)
    title = f"tcp over a link of {rate}, {model.title}, {compute:g} ms of computation, H = {EVERY}, DiLoCo"
    made = [_contender(OURS, model, "diloco", compute, names), *peers(model, compute, names)]
    made.append(_contender(SYNC, model, "sync", compute, names))
    samples = {contender.name: Samples() for contender in made}
    with contextlib.ExitStack() as stack:
        stages = {}
        for contender in made:
            notes.progress(f"{title}: starting {contender.name}")
            stages[contender.name] = stack.enter_context(Stage(contender, settings.cores))
        shares: dict[str, list[float]] = {who: [] for who in samples}
        for number in range(settings.rounds):
            for who, stage in stages.items():
                notes.progress(f"{title}: round {number + 1} of {settings.rounds}: {who}")
                warm, count = (0, _SYNC_STEPS) if who == SYNC else (EVERY if not number else 0, EVERY)
                answers = stage.run(warm, count)
                samples[who].add(answers, warm, count, 1)
                shares[who].append(max(a["exposed"] for a in answers[1:]))
    exposed = {who: sorted(found)[len(found) // 2] for who, found in shares.items()}
    shape = Workload("store", "tcp", title, model.nbytes, "paced-step", (), (SYNC,))
    return [_detailed(record, exposed) for record in records(shape, samples, {who: who for who in samples})]


def _contender(who: str, model: Model, mode: str, compute: float, names: tuple[str, str]) -> Contender:
    """Server and worker 1 at one end of the cable, worker 0 at the other."""
    here, there = (links.inside(name) for name in names)
    arguments = (model.name, mode, compute, "sleep", 2, 1, "auto")
    commands = (
        (*here, *actor("paced", "server", 0, *arguments, links.ADDRESSES[0])),
        (*here, *actor("paced", "worker", 1, *arguments, links.ADDRESSES[0])),
        (*there, *actor("paced", "worker", 0, *arguments, links.ADDRESSES[1])),
    )
    return Contender(who, commands, servers=1, environment={"TENSORWIRE_SECRET": secrets.token_hex(32)})


def _detailed(record: Record, exposed: dict[str, float]) -> Record:
    details = {"exposed_share": exposed[record.peer], "steps_per_second": 1 / record.seconds}
    record = replace(record, details=details, bytes_per_second=None)
    if record.peer != OURS:
        return record
    return replace(record, target=f"exposed <= {EXPOSED:.0%}", met=exposed[OURS] <= EXPOSED)
