"""``bench device --device verbs``: writes through the NIC, beside perftest, on one machine or between two.

On one machine they go through the NIC's own loopback. perftest (Debian's package ``perftest``) is the limit.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from tensorwire.bench.compare import Workload
from tensorwire.bench.programs import OURS, Contender, actor
from tensorwire.bench.records import Target, size_text
from tensorwire.bench.remote import local_interface, parse
from tensorwire.bench.show import Notes
from tensorwire.device import VerbsDevice

KIB, MIB = 2**10, 2**20
SMALL = 64 * KIB
SIZES = (64, MIB, 8 * MIB, 64 * MIB)
QUICK_SIZES = (64, MIB)
SHARE = 0.9
_MOST = 8 * MIB  # perftest's message: a port's largest may be no more, and larger ones are no faster


@dataclass(frozen=True)
class Ends:
    """Where the programs run. ``far``: HOST:PORT of the other machine's ``--listen``; '': both here."""

    far: str = ""

    def commands(self, name: str, *arguments: object) -> tuple[tuple[str, ...], ...]:
        """Target and initiator of one of our programs; each gets its own address as the last argument."""
        if not self.far:
            return tuple(actor(name, role, *arguments, "127.0.0.1") for role in ("target", "initiator"))
        here = local_interface(parse(self.far)[0])
        return actor("relay", "target", self.far, name, *arguments), actor(name, "initiator", *arguments, here)


def check() -> None:
    """Raises `VerbsUnavailable` where there is no RDMA."""
    VerbsDevice().close()


def workloads(sizes: Sequence[int], ends: Ends, notes: Notes, *, quick: bool) -> list[Workload]:
    """Small: a ping-pong. Large: a stream of writes; up to 1 MiB also with a signal each."""
    here = shutil.which("ib_write_bw") is not None
    if not here:
        notes.skip("perftest is not here: apt install perftest (on both machines)")
    return [
        made
        for nbytes in sizes or (QUICK_SIZES if quick else SIZES)
        for made in (_small if nbytes < SMALL else _large)(nbytes, ends, here)
    ]


def _small(nbytes: int, ends: Ends, perftest: bool) -> list[Workload]:
    limits = (Contender("ib_write_lat", ends.commands("perftest", "ib_write_lat", nbytes, nbytes)),) if perftest else ()
    title = f"verbs write + signal, {size_text(nbytes)}"
    ours = Contender(OURS, ends.commands("transfer", "verbs", nbytes, "ping-pong"))
    both = Workload("device", "verbs", title, nbytes, "ping-pong", (ours, *limits), ("ib_write_lat",), per=2)
    title = f"verbs write + completion, {size_text(nbytes)}"
    alone = Contender(OURS, ends.commands("transfer", "verbs", nbytes, "passive-target"), asleep=True)
    return [both, Workload("device", "verbs", title, nbytes, "passive-target", (alone,))]


def _large(nbytes: int, ends: Ends, perftest: bool) -> list[Workload]:
    size = min(nbytes, _MOST)
    name = "ib_write_bw" if size == nbytes else f"ib_write_bw, {size_text(size)}"
    limits: tuple[Contender, ...] = ()
    if perftest:
        commands = ends.commands("perftest", "ib_write_bw", size, nbytes)
        limits = (Contender(name, commands, "ib_write_bw"),)
    ours = Contender(OURS, ends.commands("transfer", "verbs", nbytes, "one-signal"))
    title = f"verbs writes, {size_text(nbytes)}"
    target = Target(shares={"ib_write_bw": SHARE})
    made = [Workload("device", "verbs", title, nbytes, "one-signal", (ours, *limits), ("ib_write_bw",), target)]
    if nbytes <= MIB:  # where a signal each still shows
        each = Contender(OURS, ends.commands("transfer", "verbs", nbytes, "one-way"))
        made.append(
            Workload("device", "verbs", f"verbs writes + signals, {size_text(nbytes)}", nbytes, "one-way", (each,))
        )
    return made
