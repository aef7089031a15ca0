"""What a server does with its buckets, and rules that are functions of arrays. Nothing of this imports torch.

Half-precision parameters have float32 masters. A rule works in steps, so that a norm over all servers can be taken
between them: reduce, apply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import MissingPackage, ProtocolError
from tensorwire.extras import how_to_install
from tensorwire.store.arithmetic import NAMED, ArrayFunction, reduced
from tensorwire.store.find_rule import array_function
from tensorwire.store.half_precision import half_to_single, single_to_half
from tensorwire.store.kept import Held, load_held, outline, value_of
from tensorwire.store.pushes import WRITER, Push, source_of
from tensorwire.store.rule_names import ELASTIC, KEEP, is_foreign
from tensorwire.store.rule_options import OptionsInForce, numbers_in
from tensorwire.store.sharding import Bucket, Piece, StorePlan
from tensorwire.store.state_transfer import MASTER, Item
from tensorwire.store.store_layout import StoreSpec

_HALF = ("bfloat16", "float16")


def make_rule(spec: StoreSpec, plan: StorePlan, server: int, parameters: memoryview) -> Rule:
    """The rule of one server's share. ``parameters``: the memory of all buffers, one after the other."""
    if spec.rule in (KEEP, ELASTIC):
        return (Keep if spec.rule == KEEP else Elastic)(spec, plan, server, parameters)
    if function := array_function(spec):
        return Pieces(spec, plan, server, parameters, function)
    try:
        from tensorwire.store.rules import OptimizerRule
    except ImportError as error:
        raise MissingPackage(
            f"server {server} applies the rule {spec.rule!r} with PyTorch, and cannot import it ({error}): "
            f"{how_to_install('torch')}, on the servers' machines"
        ) from None
    return OptimizerRule(spec, plan, server, parameters)


class Rule:
    """What a server does with its buckets. Round ``step`` leaves its result in buffer ``step % buffers``."""

    answers_in_slot = False  # workers get what ``apply`` has put into their slots, and not the parameters

    def __init__(self, spec: StoreSpec, plan: StorePlan, server: int, parameters: memoryview) -> None:
        self.together = spec.together  # `apply_all` once, in place of `apply` by buckets
        size = plan.shard_bytes[server]
        self.spec, self.plan = spec, plan
        self._buffers = [parameters[i * size : (i + 1) * size] for i in range(spec.buffers)]
        self._bytes = [
            [np.frombuffer(buffer, np.uint8, bucket.nbytes, bucket.shard) for bucket in plan.buckets[server]]
            for buffer in self._buffers
        ]

    def set_options(self, values: tuple[float, ...], bucket: int | None = None) -> None:
        """Puts the numbers of a round's option block into force, for one bucket or for all."""

    def assign(self, bucket: int, slot: memoryview, step: int) -> None:
        """The parameters of a bucket become what ``slot`` holds."""
        target = self._bytes[step % len(self._bytes)][bucket]
        np.copyto(target, np.frombuffer(slot, np.uint8, target.size))

    def reduce(self, bucket: int, pushes: Sequence[Push], divisor: float, *, keep: bool) -> None:
        """Adds up the workers' gradients times their weights, in their order, and divides the sum by ``divisor``.

        ``apply`` follows at once, or with ``keep`` after other buckets have been reduced.
        """

    def norm2(self, bucket: int) -> float:
        """The sum of the squares of what ``reduce`` found, in float64."""
        return 0.0

    def apply(self, bucket: int, step: int, scale: float = 1.0) -> None:
        """One update by what ``reduce`` found, times ``scale``."""
        self.carry(bucket, step)

    def apply_all(self, step: int, scale: float = 1.0) -> None:
        """One update of all buckets by what ``reduce`` found, times ``scale``."""

    def carry(self, bucket: int, step: int) -> None:
        """The values of the round before are those of round ``step``, too."""
        if len(self._bytes) > 1:
            np.copyto(self._bytes[step % len(self._bytes)][bucket], self._bytes[(step - 1) % len(self._bytes)][bucket])

    def update(self, bucket: int, pushes: Sequence[Push], options: bytes) -> None:
        """A round of a bucket whose rounds are its own: a key's. ``options``: a packed option block."""
        self.set_options(numbers_in(options), bucket)
        self.reduce(bucket, pushes, float(len(pushes)) if self.spec.reduce == "mean" else 1.0, keep=True)
        self.apply(bucket, 0)

    def let_go(self, worker: int, incarnation: int) -> None:
        """No push comes from a process any more: its memory is not to be kept."""

    def state(self) -> Iterator[Iterable[Item]]:
        """All that is kept beside the parameters, to be saved: a part for each bucket."""
        return iter(())

    def load_state(self, items: Iterable[Item]) -> None:
        """Replaces all that is kept beside the parameters. Raises `ProtocolError`."""
        for entry, _ in items:
            raise ProtocolError(f"{self.spec.rule} keeps nothing, and worker 0 loads {entry}")


class Keep(Rule):
    """Leaves the parameters as they are: for measuring all of a step but the update."""


class PieceValues(Held):
    """The values of one piece, and what was pushed for them; of half precision in float32, if they have a ``master``.

    ``master``: what is changed; the values themselves, or the float32 that those of half precision are rounded from.
    A framework has a subclass with arrays of its own.
    """

    outline = staticmethod(outline)
    value_of = staticmethod(value_of)
    rows: bool | None = None  # as in `Held.items`

    def __init__(self, number: int, piece: Piece, rule: Rule, bucket: Bucket, buffers: Sequence[memoryview]) -> None:
        spec = rule.plan.tensors[piece.tensor]
        super().__init__(piece, spec, spec.shape if rule.spec.whole else (piece.stop - piece.start,))
        self.number = number
        self.half = self.spec.dtype in _HALF and self.has_master(rule.spec)
        self.own = [self.view(buffer, bucket.shard) for buffer in buffers]
        self.master: Any = self.read(self.own[0])
        self.found: Any = None  # what the pushes of a round came to
        self.room: Any = None  # for it
        self._slots: dict[int, Any] = {}  # by worker; a slot never moves
        self.kept: dict[str, Any] = {}  # by a function

    def has_master(self, spec: StoreSpec) -> bool:
        """Whether values of half precision have one."""
        return not spec.keys

    def view(self, memory: memoryview, start: int) -> Any:
        """The piece where the bucket begins at ``start``; of bfloat16, the bits."""
        dtype = "uint16" if self.spec.dtype == "bfloat16" else self.spec.dtype
        count, offset = self.piece.stop - self.piece.start, start + self.piece.offset
        return np.frombuffer(memory, dtype, count, offset).reshape(self.shape)

    def read(self, values: Any) -> Any:
        """Values as what is computed with: a copy where there is a master."""
        return half_to_single(values) if self.half else values

    def put(self, values: Any, out: Any) -> None:
        """Rounds them, if need be."""
        np.copyto(out, single_to_half(values, self.spec.dtype) if self.half else values)

    def rounded(self, values: Any) -> Any:
        """Values as they are read back after they were put."""
        return self.read(single_to_half(values, self.spec.dtype))

    def assigned(self, step: int) -> None:
        """The values of the buffer of ``step`` are new ones. A master that rounds to its value says more than it."""
        if self.half:
            new = self.read(self.own[step % len(self.own)])
            other = self.rounded(self.master) != new
            self.master[other] = new[other]

    def saved(self) -> Iterator[Item]:
        """What is kept for them; a master only if it says more than the values do."""
        more = self.half and not bool((self.rounded(self.master) == self.master).all())
        yield from self.items({**self.kept, **({MASTER: self.master} if more else {})}, self.outline, rows=self.rows)

    def load(self, found: dict[str, Item]) -> None:
        """What is kept becomes ``found``, which changes no value: a master counts where it rounds to the value."""
        kept = {key: self.value_of(*item) for key, item in found.items()}
        master = kept.pop(MASTER, None) if self.half else None
        self.kept = kept
        if master is not None:
            master = master.reshape(self.shape)
            same = self.rounded(master) == self.rounded(self.master)
            self.master[same] = master[same]

    def slot(self, push: Push) -> Any:
        """What a worker has pushed, where it lies."""
        if push.worker == WRITER:
            return self.view(push.slot, 0)
        if push.worker not in self._slots:
            self._slots[push.worker] = self.view(push.slot, 0)
        return self._slots[push.worker]

    def let_go(self, worker: int, incarnation: int) -> None:
        """As `Rule.let_go`."""
        for kept in (False, True):
            self._slots.pop(source_of(worker, incarnation, kept=kept), None)

    def reduce(self, pushes: Sequence[Push], divisor: float) -> None:
        """Their sum, in their order, each times its weight, over ``divisor``."""
        if len(pushes) == 1 and divisor == pushes[0].weight == 1:  # the most frequent case takes the short way
            (push,) = pushes
            self.found = self.read(self.slot(push)) if push.present[self.number] else None
            return
        mine = [push for push in pushes if push.present[self.number]]
        values = (self.read(self.slot(push)) for push in mine)
        self.found = reduced(values, [push.weight for push in mine], divisor, self._sum) if mine else None

    def _sum(self) -> Any:
        if self.room is None:
            self.room = np.empty(self.shape, np.float32 if self.spec.dtype == "float16" else self.master.dtype)
        return self.room


class Pieces(Rule):
    """Floating-point pieces, which a function of arrays changes by what ``reduce`` found: flat parts of parameters."""

    kind = PieceValues

    def __init__(
        self,
        spec: StoreSpec,
        plan: StorePlan,
        server: int,
        parameters: memoryview,
        function: ArrayFunction | None = None,
    ) -> None:
        super().__init__(spec, plan, server, parameters)
        self._values = [
            [
                self.kind(number, piece, self, bucket, self._buffers)
                for number, piece in enumerate(bucket.pieces)
                if (spec.keys and function)
                or ("float" in plan.tensors[piece.tensor].dtype and piece.stop > piece.start)
            ]
            for bucket in plan.buckets[server]
        ]
        self._function, self._in_force = function, OptionsInForce(spec)
        self._optionless, self._foreign = function in NAMED.values(), is_foreign(spec.rule)
        self._options: list[dict[str, Any]] = [{} for _ in self._values]

    def set_options(self, values: tuple[float, ...], bucket: int | None = None) -> None:
        if self._optionless:
            return
        options = self._in_force.with_numbers(values)
        for number in range(len(self._options)) if bucket is None else [bucket]:
            self._options[number] = options

    def assign(self, bucket: int, slot: memoryview, step: int) -> None:
        super().assign(bucket, slot, step)
        for part in self._values[bucket]:
            part.assigned(step)

    def reduce(self, bucket: int, pushes: Sequence[Push], divisor: float, *, keep: bool) -> None:
        for part in self._values[bucket]:
            part.reduce(pushes, divisor)

    def norm2(self, bucket: int) -> float:
        found = [part.found for part in self._values[bucket] if part.found is not None]
        return sum(float(np.linalg.norm(each.astype(np.float64, copy=False))) ** 2 for each in found)

    def apply(self, bucket: int, step: int, scale: float = 1.0) -> None:
        assert self._function is not None
        self.carry(bucket, step)
        for part in self._values[bucket]:
            out = part.own[step % len(part.own)]
            if not part.half:
                part.master = out
            if part.found is None:
                continue
            found = part.found if scale == 1.0 else part.found * part.found.dtype.type(scale)
            if self._foreign:  # the store's own keep the precision of the sum
                found = found.astype(part.master.dtype, copy=False)
            part.found = None  # it may lie in memory that a writer gives back
            if found is not part.master:
                self._function(part.master, found, part.kept, self._options[bucket])
            if part.half:
                part.put(part.master, out)

    def let_go(self, worker: int, incarnation: int) -> None:
        for part in chain.from_iterable(self._values):
            part.let_go(worker, incarnation)

    def state(self) -> Iterator[Iterable[Item]]:
        return (chain.from_iterable(part.saved() for part in parts) for parts in self._values)

    def load_state(self, items: Iterable[Item]) -> None:
        parts = [part for parts in self._values for part in parts]
        loaded = load_held(parts, items)
        strange = {key for found in loaded for key in found} - {MASTER}
        if strange and self.spec.rule in (*NAMED, ELASTIC):
            raise ProtocolError(f"{self.spec.rule} keeps nothing, and worker 0 loads {min(strange)!r}")
        for part, found in zip(parts, loaded, strict=True):
            self.forget(part)
            part.load(found)

    def forget(self, part: PieceValues) -> None:
        """State is about to be loaded: a master that is not in it is what the value says."""
        if part.half:
            part.master = part.read(part.own[0])


class Elastic(Pieces):
    """Moves the parameters by a share of the difference to what one worker pushed, and leaves that in its slot."""

    answers_in_slot = True

    def __init__(self, spec: StoreSpec, plan: StorePlan, server: int, parameters: memoryview) -> None:
        super().__init__(spec, plan, server, parameters)
        self._server = server
        self._pushed: list[Push | None] = [None] * len(plan.buckets[server])

    def set_options(self, values: tuple[float, ...], bucket: int | None = None) -> None:
        self._alpha = values[0]

    def reduce(self, bucket: int, pushes: Sequence[Push], divisor: float, *, keep: bool) -> None:
        (push,) = pushes
        self._pushed[bucket] = push

    def apply(self, bucket: int, step: int, scale: float = 1.0) -> None:
        push = self._pushed[bucket]
        assert push is not None
        here = {part.number: part for part in self._values[bucket]}
        for number, piece in enumerate(self.plan.buckets[self._server][bucket].pieces):
            part = here.get(number)
            if part is None:
                nbytes = DTYPES[self.plan.tensors[piece.tensor].dtype] * (piece.stop - piece.start)
                np.frombuffer(push.slot, np.uint8, nbytes, piece.offset)[:] = 0
                continue
            slot, own = part.slot(push), part.own[0]
            # As the worker computes: in its dtype.
            part.put(part.read(slot) - part.read(own), slot)
            part.put(part.read(slot) * part.master.dtype.type(self._alpha), slot)
            part.master += part.read(slot)
            if part.half:
                part.put(part.master, own)
