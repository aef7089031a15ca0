"""``bench edge``: a tensor that is born in the consumer's slot; mapped, so that no byte moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tensorwire.bench.baselines import Peers
from tensorwire.bench.compare import Workload
from tensorwire.bench.programs import OURS, Contender, actors
from tensorwire.bench.records import Target, size_text

SIZES = (4 * 2**10, 64 * 2**20)
_FLAG = 8  # bytes of payload in the C floor: it moves none either, to speak of


def workloads(devices: Sequence[str], sizes: Sequence[int], peers: Peers) -> list[Workload]:
    """slot, send, receive, release: there and back, half of it. On tcp the slot is written across."""
    made = []
    for device in devices:
        for nbytes in sizes or SIZES:
            contenders = [Contender(OURS, actors("edge", device, nbytes))]
            title = f"{device} static edge, {size_text(nbytes)}"
            if device == "shm":
                floor = peers.copies(_FLAG, "ping-pong", ("memcpy",), "C flag")
                contenders += [replace(contender, name="C flag") for contender in floor]
                mode, limits, target = "mapped", ("C flag",), Target(2e-6)
            else:
                contenders += peers.sockets(nbytes, (0, 256 * 2**10), nbytes)
                mode, limits, target = "ping-pong", ("C sockets",), None
            made.append(Workload("edge", device, title, nbytes, mode, tuple(contenders), limits, target, per=2))
    return made
