"""``--waiting``: what waits cost the others, with more waiting processes than cores."""

from __future__ import annotations

from collections.abc import Sequence

from tensorwire.bench.compare import Samples, Settings, Workload, records
from tensorwire.bench.programs import OURS, Contender, Stage, actor
from tensorwire.bench.records import Record, Target
from tensorwire.bench.show import Notes

PROCESSES = 3
_LIMIT = 0.05  # of a core


def measure(devices: Sequence[str], settings: Settings, seconds: float, notes: Notes) -> list[Record]:
    """The worst of three processes that wait on two cores, for ``seconds`` a round."""
    made: list[Record] = []
    for device in devices:
        contender = Contender(OURS, tuple(actor("idle", str(i), device) for i in range(PROCESSES)))
        title = f"{device}: {PROCESSES} processes wait, CPU time a second"
        workload = Workload("device", device, title, 0, "idle", (contender,), target=Target(_LIMIT, worst=True))
        samples = Samples()
        with Stage(contender, settings.cores) as stage:
            for round in range(settings.rounds):
                notes.progress(f"{title}: round {round + 1} of {settings.rounds}")
                answers = stage.run(0, int(seconds * 1e3))
                samples.seconds.append(max(a["seconds"] for a in answers) / seconds)
        made += records(workload, {OURS: samples}, {OURS: OURS})
    return made
