"""``bench edge``: tensors of one size over one edge, beside copies and sockets in C.

A steady stream: the producer makes the next tensor while the consumer is at the last. Where the payload is born
in mapped memory no byte moves; the mode says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tensorwire.bench.compare import Workload
from tensorwire.bench.limits import Limits
from tensorwire.bench.programs import OURS, Contender, actor, pair
from tensorwire.bench.records import Target, size_text

KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = (KIB, 64 * KIB, MIB, 64 * MIB, GIB)
QUICK_SIZES = (KIB, MIB)
LARGE = 256 * MIB  # from here on few rounds
_FLAG = 8  # bytes of payload in the C flag: it moves none either, to speak of
_DEPTH = 2  # tensors on their way
_STREAM = 4  # tensors of a round at least: one alone is not a stream
_TITLES = {
    "transfer": "transfer alone",
    "transfer-mapped": "transfer alone (no byte moved)",
    "whole": "produced, transferred, consumed",
    "whole-mapped": "produced, transferred (no byte moved), consumed",
}
_SIGNAL = 2e-6


def workloads(devices: Sequence[str], nbytes: int, limits: Limits) -> list[Workload]:
    """The transfer alone, then with a producer and a consumer, over each device."""
    made = []
    for device in devices:
        memory = (4 if device == "shm" else 6) * nbytes
        ours = Contender(OURS, pair(actor("edge"), device, nbytes), memory=memory, how="static edge of two slots")
        floor = replace(ours, name="ends alone", how="what both ends do, without anything between them")
        lists = {"transfer": [ours, *_limits(device, nbytes, limits)], "whole": [ours, floor]}
        for word, contenders in lists.items():
            mode = f"{word}-mapped" if device == "shm" else word
            made.append(
                Workload(
                    "edge",
                    device,
                    f"{device} edge, {size_text(nbytes)}, {_TITLES[mode]}",
                    nbytes,
                    mode,
                    tuple(replace(c, word="alone" if c is floor else word) for c in contenders),
                    limits=("C flag", "C sockets", floor.name),
                    target=Target(_SIGNAL) if mode == "transfer-mapped" else None,
                    stage=f"{device}, {nbytes}",
                    least=_STREAM,
                )
            )
    return made


def _limits(device: str, nbytes: int, limits: Limits) -> list[Contender]:
    if device != "shm":
        made = limits.sockets(nbytes, (0, 256 * KIB), _DEPTH)
        return [replace(c, memory=2 * nbytes) for c in made]
    flag = limits.copies(_FLAG, "stream", ("memcpy",), "C flag")
    copy = limits.copies(nbytes, "stream", ("memcpy",), "C memcpy")
    return [*(replace(c, name="C flag") for c in flag), *(replace(c, memory=3 * nbytes) for c in copy)]
