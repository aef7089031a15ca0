"""``store --part diloco --link RATE``: DiLoCo over a slow link, beside a step of sync on the same link.

A step's computation is a sleep of a stated length, as if an accelerator computed. What of a step is not computation is
exposed communication: the time that ``step()`` takes.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks import ACTORS, links
from benchmarks.actors.paced import EVERY
from benchmarks.links import Places
from benchmarks.options import Options
from benchmarks.steps import step_records
from tensorwire.bench.compare import Settings, Stages, Workload, take_turns
from tensorwire.bench.programs import OURS, Answer, Stage, actor, job
from tensorwire.bench.records import Record
from tensorwire.bench.show import Notes
from tensorwire.errors import ArgumentError
from tensorwire.models import Model, find

# Milliseconds that a step computes: about what it took in `python -m benchmarks train`. At 100 Mbit/s it is
# ten times as long, as if batches were larger: shorter steps than an exchange takes could not hide it.
COMPUTE = {"gpt2": 1000.0}
OTHERS = 500.0
SLOW = "100mbit"
QUICK_COMPUTE = 20.0
EXPOSED = 0.02
SYNC = f"{OURS}, sync"
_STEPS = {OURS: EVERY, SYNC: 2}  # of a round


def measure(options: Options, settings: Settings, notes: Notes) -> list[Record]:
    """Each model over each link."""
    if not options.links:
        raise ArgumentError("--part diloco needs --link, such as 1gbit")
    models = [find(name) for name in options.workloads]

    def over(rate: str, places: Places) -> list[Record]:
        pace = {m.name: COMPUTE.get(m.name, OTHERS) * (10 if rate == SLOW else 1) for m in models}
        pace = dict.fromkeys(pace, QUICK_COMPUTE) if options.quick else pace
        return [r for m in models for r in _contest(m, rate, places, pace[m.name], settings, notes)]

    return links.over_each(options.links, notes, over)


def _contest(model: Model, rate: str, places: Places, compute: float, settings: Settings, notes: Notes) -> list[Record]:
    """Both in turns; DiLoCo warms up by ``EVERY`` steps, and a round has as many."""
    title = f"tcp over a link of {rate}, {model.title}, {compute:g} ms of computation, H = {EVERY}, DiLoCo"
    contenders = {
        who: job(who, actor("paced", ACTORS), model.name, mode, compute, "auto", workers=2, places=places)
        for who, mode in ((OURS, "diloco"), (SYNC, "sync"))
    }
    warm: set[str] = set()

    def ask(who: str, stage: Stage) -> list[Answer]:
        if who == OURS and who not in warm:
            warm.add(who)
            stage.run(EVERY, 0)
        answers = stage.run(0, _STEPS[who])
        return [{what: n if what == "exposed" else n / _STEPS[who] for what, n in a.items()} for a in answers]

    with Stages(settings.cores) as stages:
        told = take_turns(stages, contenders, settings.rounds, ask, label=title, notes=notes)
    shares = {who: sorted(max(a["exposed"] for a in answers[1:]) for answers in told[who]) for who in told}
    exposed = {who: found[len(found) // 2] for who, found in shares.items()}

    def details(who: str, seconds: float) -> dict[str, float]:
        return {"exposed_share": exposed[who], "steps_per_second": 1 / seconds}

    shape = Workload("store", "tcp", title, model.nbytes, "paced-step", (), (SYNC,))
    ours, sync = step_records(shape, told, 0, 1, details)
    return [replace(ours, target=f"exposed <= {EXPOSED:.0%}", met=exposed[OURS] <= EXPOSED), sync]
