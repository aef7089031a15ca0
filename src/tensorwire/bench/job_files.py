"""``bench files``: a job as files: reads by Python and through a mount, pushes by writing, and what training pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

from tensorwire.bench.compare import Workload
from tensorwire.bench.limits import Limits
from tensorwire.bench.programs import actor
from tensorwire.bench.records import Target
from tensorwire.bench.show import Notes
from tensorwire.bench.weights import COPY, Weights
from tensorwire.bench.writes import copy_kinds
from tensorwire.errors import Unsupported
from tensorwire.files.mounting import check_can_mount

SIZES, QUICK_SIZES = (64 * 2**20, 512 * 2**20), (2**20, 4 * 2**20)
MOUNTED, QUICK_MOUNTED, STEPS = 500 * 2**20, 4 * 2**20, 32
TMPFS, NOT_LOADED, KEYS = "tmpfs", "nobody loads", "KeyValue.push"
_READ, _HERE, _WARM, _LOADED, _PUSHED = 0.85, 1.05, 1.8, 1.02, 0.9  # shares of limits, and times of limits


def workloads(devices: Sequence[str], limits: Limits, notes: Notes, *, quick: bool) -> list[Workload]:
    """All of them in the order of the table."""
    small, large = QUICK_SIZES if quick else SIZES
    reader = actor("version")
    made = []
    for device in devices:
        for nbytes in (small, large):
            weights = Weights(nbytes, device)
            ours, copies = limits.same_memory(weights.contender(program=reader), copy_kinds(), COPY)
            others = [replace(c, word=f"idle:{c.word}:1") for c in copies] if device == "shm" else []
            target = Target(shares={COPY: _READ}) if device == "shm" else None
            contenders = [replace(ours, word="idle:readinto:1"), *others]
            made.append(weights.workload("file-read", contenders, COPY, target))
    if "shm" in devices:
        made += mounts(QUICK_MOUNTED if quick else MOUNTED, notes)
        made += loads(large, notes, steps=4 if quick else STEPS)
    for device in devices:
        weights = Weights(small, device, readers=0, tensors=1)
        ours = weights.contender(program=actor("file_pushes"))
        contenders = [replace(ours, word="file"), replace(ours, name=KEYS, word="push")]
        made.append(weights.workload("file-pushed", contenders, KEYS, Target(shares={KEYS: _PUSHED})))
    return [replace(each, bench="files") for each in made]


def mounts(nbytes: int, notes: Notes) -> list[Workload]:
    """A version's file through a mount, beside the same file in memory."""
    try:
        check_can_mount()
    except Unsupported as error:
        notes.skip(f"mounts: {error}")
        return []
    weights = Weights(nbytes)
    ours = weights.contender(program=actor("version"))
    plain = replace(ours, name=TMPFS, word="idle:tmpfs:1")
    targets = {"here": Target(sums={TMPFS: _HERE}), "warm": Target(sums={TMPFS: _WARM}), "cold": None}
    return [
        weights.workload(f"mount-{what}", [replace(ours, word=f"idle:{what}:1"), plain], TMPFS, target)
        for what, target in targets.items()
    ]


def loads(nbytes: int, notes: Notes, *, steps: int) -> list[Workload]:
    """Steps of training, in which another program loads the newest version once."""
    if find_spec("safetensors") is None:
        notes.skip("loads: safetensors is not here: pip install safetensors")
        return []
    weights = Weights(nbytes, readers=0)
    ours = weights.contender(program=actor("version"))
    contenders = [replace(ours, word=f"{steps}:loaded"), replace(ours, name=NOT_LOADED, word=f"{steps}:steps")]
    target = Target(sums={NOT_LOADED: _LOADED})
    return [weights.workload("step-loaded", contenders, NOT_LOADED, target, steps=steps)]
