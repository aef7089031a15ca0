"""``bench versions``: weights for readers: reads, files, what training and readers pay, and several readers at once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from tensorwire.bench.actors.version import BUFFERS
from tensorwire.bench.compare import Workload
from tensorwire.bench.limits import Limits
from tensorwire.bench.programs import HERE, OURS, Contender, Place, actor
from tensorwire.bench.records import Target, size_text
from tensorwire.bench.show import Notes
from tensorwire.bench.writes import BUFFER_SIZES, copy_kinds
from tensorwire.sizes import counted

TENSORS = 16
SIZES, QUICK_SIZES = (512 * 2**20, 2**30), (4 * 2**20, 4 * 2**20)  # of all but pauses, and of pauses
AT_ONCE = 8
COPY, PLAIN, NONE, OWN, ALONE = "best C copy", "plain file", "no version", "own copy", "one reader"
_READ, _FILE, _STEP, _AT_ONCE = 0.85, 0.98, 1.02, 1.3  # shares of limits, and times of limits
_PAUSE = 0.05  # seconds


@dataclass(frozen=True)
class Weights:
    """What is published: so many bytes in so many tensors; by how many readers it is read, and over what device."""

    nbytes: int
    device: str = "shm"
    readers: int = 1
    tensors: int = TENSORS

    def contender(self, places: Sequence[Place] = HERE, program: tuple[str, ...] = actor("version")) -> Contender:
        """The server, the worker that trains, and the readers, which are at the last of ``places``."""
        roles = [("server", 0), ("worker", 0), *(("reader", i) for i in reversed(range(self.readers)))]
        host, words = places[0][1], (self.device, self.nbytes, self.tensors, self.readers)
        commands = tuple(
            (*places[-1 if role == "reader" else 0][0], *program, role, *map(str, (index, *words, host)))
            for role, index in roles
        )
        return Contender(
            OURS,
            commands,
            servers=1,
            meanwhile=min(self.readers, 1),
            environment={"TENSORWIRE_SECRET": secrets.token_hex(32)},
            memory=(5 + BUFFERS + 3 * self.readers) * self.nbytes,
        )

    def workload(
        self, mode: str, contenders: Sequence[Contender], limit: str, target: Target | None, *, steps: int = 1
    ) -> Workload:
        """A row of the table. ``steps``: from one version to the next, where the figure is of a step."""
        readers = counted(self.readers, "reader") if self.readers else f"one of every {counted(steps, 'step')}"
        return Workload(
            bench="versions",
            device=self.device,
            name=f"versions of {size_text(self.nbytes)} in {self.tensors} tensors, {self.device}, {readers}",
            nbytes=self.nbytes,
            mode=mode,
            contenders=tuple(contenders),
            limits=(limit,),
            target=target,
            per=steps,
            stage=f"{self.device} {self.readers} {self.nbytes}",
        )


def workloads(devices: Sequence[str], limits: Limits, notes: Notes, *, quick: bool) -> list[Workload]:
    """All of them in the order of the table."""
    nbytes, large = QUICK_SIZES if quick else SIZES
    stock = find_spec("safetensors") is not None
    if not stock:
        notes.skip("files: safetensors is not here: pip install safetensors")
    made: list[Workload] = []
    for device in devices:
        made += [*one(Weights(nbytes, device), limits, stock=stock), pause(Weights(large, device), limits)]
    made += steps(Weights(nbytes, readers=0), limits)
    for device in devices:
        made += several(Weights(nbytes, device, 2 if quick else AT_ONCE), limits, stock=stock)
    return made


def one(weights: Weights, limits: Limits, *, stock: bool) -> list[Workload]:
    """What one reader reads, while others train and while they do not; and stock files."""
    ours, copies = limits.same_memory(weights.contender(), copy_kinds(), COPY)
    shm = weights.device == "shm"
    sockets = [] if shm else limits.sockets(weights.nbytes, BUFFER_SIZES)
    made = []
    for state in ("training", "idle"):
        others = [replace(c, word=f"{state}:{c.word}:1") for c in copies] if shm else sockets
        contenders = (replace(ours, word=f"{state}:pull:1"), *others)
        limit, target = (COPY, Target(shares={COPY: _READ})) if shm else ("C sockets", None)
        made.append(weights.workload(f"read-{state}", contenders, limit, target))
    for mode, word in (("file-mapped", "map"), ("file-loaded", "load")) if shm and stock else ():
        plain = replace(ours, name=PLAIN, word=f"idle:plain-{word}:1")
        contenders = (replace(ours, word=f"idle:{word}:1"), plain)
        made.append(weights.workload(mode, contenders, PLAIN, Target(shares={PLAIN: _FILE})))
    return made


def steps(weights: Weights, limits: Limits) -> list[Workload]:
    """What training pays beyond the copy."""
    ours, copies = limits.same_memory(weights.contender(), copy_kinds(), COPY)
    target, base = Target(sums={NONE: _STEP, COPY: 1.0}), replace(ours, name=NONE)
    made = []
    for count in (1, 4):
        contenders = [replace(ours, word=f"{count}:version"), replace(base, word=f"{count}:steps")]
        contenders += [replace(c, word=f"{count}:{c.word}") for c in copies]
        made.append(weights.workload("step-published", contenders, NONE, target, steps=count))
    return made


def pause(weights: Weights, limits: Limits) -> Workload:
    """What a reader that computes waits."""
    ours, _ = limits.same_memory(weights.contender(), (), "")
    contenders = (replace(ours, word="idle:commit:1"), replace(ours, name=OWN, word="idle:copy:1"))
    return weights.workload("commit", contenders, OWN, Target(_PAUSE, sums={OWN: 1.0}))


def several(weights: Weights, limits: Limits, *, stock: bool) -> list[Workload]:
    """Several readers at once, beside one."""
    ours, copies = limits.same_memory(weights.contender(), copy_kinds(), f"{weights.readers} C copies at once")
    shm, target = weights.device == "shm", Target(sums={ALONE: _AT_ONCE})
    plain = replace(ours, name=f"{PLAIN}, at once", word="plain-map")
    kinds = {"map": [plain]} if shm and stock else {}
    kinds["pull"] = [replace(c, name=f"{c.name}, at once") for c in copies if shm]
    made = []
    for word, others in kinds.items():
        at_once = [replace(ours, word=word), *others]
        contenders = [replace(c, word=f"idle:{c.word}:{weights.readers}") for c in at_once]
        contenders.append(replace(ours, name=ALONE, word=f"idle:{word}:1"))
        made.append(weights.workload("at-once-mapped" if word == "map" else "at-once-read", contenders, ALONE, target))
    return made
