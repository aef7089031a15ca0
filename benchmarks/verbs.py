"""``device --device verbs``: the writes of ``tensorwire bench device``, beside perftest, on one machine or between two.

perftest (Debian's package ``perftest``) is the limit.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks import ACTORS
from benchmarks.remote import OURS_THERE, local_interface, parse
from tensorwire.bench import writes
from tensorwire.bench.compare import Workload
from tensorwire.bench.limits import Limits
from tensorwire.bench.programs import Contender, actor, pair
from tensorwire.bench.records import Target, size_text
from tensorwire.bench.show import Notes

SHARE = 0.9
_MOST = 8 * 2**20  # perftest's message: a port's largest may be no more, and larger ones are no faster
_TOOLS = {"ping-pong": "ib_write_lat", "one-signal": "ib_write_bw"}


@dataclass(frozen=True)
class Ends:
    """Where the programs run. ``far``: HOST:PORT of the other machine's ``--listen``; '': both here."""

    far: str = ""

    def commands(self, name: str, *arguments: object) -> tuple[tuple[str, ...], ...]:
        """Target and initiator of one of our programs; each gets its own address as the last argument."""
        program = actor(name, OURS_THERE[name])
        if not self.far:
            return pair(program, *arguments, "127.0.0.1")
        here = local_interface(parse(self.far)[0])
        words = tuple(map(str, arguments))
        return (*actor("relay", ACTORS), "target", self.far, name, *words), (*program, "initiator", *words, here)


def workloads(sizes: Sequence[int], ends: Ends, notes: Notes, *, quick: bool) -> list[Workload]:
    """The package's own, at these ends, each with perftest where it has the same."""
    perftest = shutil.which("ib_write_bw") is not None
    if not perftest:
        notes.skip("perftest is not here: apt install perftest (on both machines)")
    made = writes.workloads(["verbs"], sizes, Limits(notes), quick=quick)
    return [_beside_perftest(workload, ends, perftest) for workload in made]


def _beside_perftest(workload: Workload, ends: Ends, perftest: bool) -> Workload:
    nbytes, mode = workload.nbytes, workload.mode
    ours = replace(workload.contenders[0], commands=ends.commands("transfer", "verbs", nbytes, mode))
    if mode not in _TOOLS or not perftest:
        return replace(workload, contenders=(ours,))
    tool, size = _TOOLS[mode], min(nbytes, _MOST)
    name = tool if size == nbytes else f"{tool}, {size_text(size)}"
    limit = Contender(name, ends.commands("perftest", tool, size, nbytes), tool)
    target = Target(shares={tool: SHARE}) if mode == "one-signal" else None
    return replace(workload, contenders=(ours, limit), limits=(tool,), target=target)
