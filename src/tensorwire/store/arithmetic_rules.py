"""What a server does with its buckets, and the rules that only add, average and copy. Nothing of this imports torch.

Sums are taken in worker order, in float32 for half-precision parameters, which have float32 masters. A rule works in
steps, so that a norm over all servers can be taken between them: reduce, apply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tensorwire.edge.tensor import DTYPES
from tensorwire.errors import MissingPackage, ProtocolError
from tensorwire.extras import how_to_install
from tensorwire.store.array_functions import ArrayFunction, OptionsInForce, array_function, kept_items, load_part
from tensorwire.store.half_precision import half_to_single, single_to_half
from tensorwire.store.pushes import Push
from tensorwire.store.rule_names import ELASTIC, KEEP, MEAN, SUM
from tensorwire.store.sharding import Bucket, Piece, StorePlan
from tensorwire.store.state_transfer import MASTER, Entry, Item
from tensorwire.store.store_layout import StoreSpec

Array = np.ndarray[Any, Any]
_HALF = ("bfloat16", "float16")


def make_rule(spec: StoreSpec, plan: StorePlan, server: int, parameters: memoryview) -> Rule:
    """The rule of one server's share. ``parameters``: the memory of all buffers, one after the other."""
    kind = {KEEP: Keep, SUM: Sum, MEAN: Mean, ELASTIC: Elastic}.get(spec.rule)
    if kind is not None:
        return kind(spec, plan, server, parameters)
    if function := array_function(spec):
        return ArrayFunctionRule(function, spec, plan, server, parameters)
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

    def state(self) -> Iterator[Iterable[Item]]:
        """All that is kept beside the parameters, to be saved: a part for each bucket."""
        return iter(())

    def load_state(self, items: Iterable[Item]) -> None:
        """Replaces all that is kept beside the parameters. Raises `ProtocolError`."""
        for entry, _ in items:
            raise ProtocolError(f"{self.spec.rule} keeps nothing, and worker 0 loads {entry}")


class Keep(Rule):
    """Leaves the parameters as they are: for measuring all of a step but the update."""


class _Floats:
    """The floating-point values of one piece, and what was pushed for them.

    ``master``: what is changed; the values themselves, or the float32 that those of half precision are rounded from.
    """

    def __init__(
        self, number: int, piece: Piece, plan: StorePlan, bucket: Bucket, buffers: Sequence[memoryview]
    ) -> None:
        self.number, self.piece, self.spec = number, piece, plan.tensors[piece.tensor]
        self.half = self.spec.dtype in _HALF
        self.own = [self.view(buffer, bucket.shard) for buffer in buffers]
        self.master = self.read(self.own[0]) if self.half else self.own[0]
        self.found: Array | None = None  # what the pushes of a round came to
        self._room: Array | None = None
        self._slots: dict[int, Array] = {}  # by worker; a slot never moves
        self.kept: dict[str, Any] = {}  # by a function

    def view(self, memory: memoryview, start: int) -> Array:
        """The piece where the bucket begins at ``start``; of bfloat16, the bits."""
        dtype = "uint16" if self.spec.dtype == "bfloat16" else self.spec.dtype
        return np.frombuffer(memory, dtype, self.piece.stop - self.piece.start, start + self.piece.offset)

    def read(self, values: Array) -> Array:
        """Values as what is computed with: a copy for those of half precision."""
        return half_to_single(values) if self.half else values

    def put(self, values: Array, out: Array) -> None:
        """Rounds them, if need be."""
        np.copyto(out, single_to_half(values, self.spec.dtype) if self.half else values)

    def slot(self, push: Push) -> Array:
        """What a worker has pushed, where it lies."""
        if push.worker not in self._slots:
            self._slots[push.worker] = self.view(push.slot, 0)
        return self._slots[push.worker]

    def reduce(self, pushes: Sequence[Push], divisor: float) -> None:
        """Their sum, in their order, each times its weight, over ``divisor``."""
        mine = [push for push in pushes if push.present[self.number]]
        self.found = None
        if not mine:
            return
        plain = all(push.weight == 1.0 for push in mine)
        if len(mine) == 1 and plain and divisor == 1.0:
            self.found = self.read(self.slot(mine[0]))
            return
        if self._room is None:
            self._room = np.empty_like(self.master)
        total = self._room
        if plain and len(mine) > 1:
            np.add(self.read(self.slot(mine[0])), self.read(self.slot(mine[1])), out=total)
            mine = mine[2:]
        else:
            total[:] = 0
        for push in mine:
            value = self.read(self.slot(push))
            total += value if push.weight == 1.0 else value * total.dtype.type(push.weight)
        if divisor != 1.0:
            total /= total.dtype.type(divisor)
        self.found = total


class Pieces(Rule):
    """A rule that changes floating-point pieces by what ``reduce`` found, and keeps nothing but their masters."""

    def __init__(self, spec: StoreSpec, plan: StorePlan, server: int, parameters: memoryview) -> None:
        super().__init__(spec, plan, server, parameters)
        self._floats = [
            [
                _Floats(number, piece, plan, bucket, self._buffers)
                for number, piece in enumerate(bucket.pieces)
                if "float" in plan.tensors[piece.tensor].dtype and piece.stop > piece.start
            ]
            for bucket in plan.buckets[server]
        ]

    def assign(self, bucket: int, slot: memoryview, step: int) -> None:
        super().assign(bucket, slot, step)
        for floats in self._floats[bucket]:
            if floats.half:  # what rounds to the value that was loaded says more than it does
                new = floats.own[step % len(floats.own)]
                same = floats.read(single_to_half(floats.master, floats.spec.dtype)) == floats.read(new)
                floats.master = np.where(same, floats.master, floats.read(new))

    def reduce(self, bucket: int, pushes: Sequence[Push], divisor: float, *, keep: bool) -> None:
        for floats in self._floats[bucket]:
            floats.reduce(pushes, divisor)

    def norm2(self, bucket: int) -> float:
        found = [floats.found for floats in self._floats[bucket] if floats.found is not None]
        return sum(float(np.linalg.norm(each.astype(np.float64, copy=False))) ** 2 for each in found)

    def apply(self, bucket: int, step: int, scale: float = 1.0) -> None:
        self.carry(bucket, step)
        for floats in self._floats[bucket]:
            out = floats.own[step % len(floats.own)]
            if not floats.half:
                floats.master = out
            if floats.found is None:
                continue
            found = floats.found if scale == 1.0 else floats.found * floats.found.dtype.type(scale)
            self.change(floats, found)
            if floats.half:
                floats.put(floats.master, out)

    def change(self, floats: _Floats, pushed: Array) -> None:
        """Changes the master of a piece in place."""
        raise NotImplementedError

    def state(self) -> Iterator[Iterable[Item]]:
        return map(self._kept, self._floats)

    def _kept(self, pieces: Sequence[_Floats]) -> Iterator[Item]:
        """What is kept for a bucket."""
        for floats in (each for each in pieces if each.half):
            rounded = floats.read(single_to_half(floats.master, floats.spec.dtype))
            if not np.array_equal(rounded, floats.master):
                piece, shape = floats.piece, floats.spec.shape
                entry = Entry(piece.tensor, MASTER, "float32", shape, True, piece.start, piece.stop)
                yield entry, floats.master.view(np.uint8).data

    def load_state(self, items: Iterable[Item]) -> None:
        pieces = [each for bucket in self._floats for each in bucket if each.half]
        loaded: list[tuple[_Floats, Entry, Array]] = []
        for entry, data in items:
            mine = [f for f in pieces if f.piece.tensor == entry.tensor and f.piece.start <= entry.start]
            mine = [f for f in mine if entry.stop <= f.piece.stop]
            if entry.key != MASTER or entry.dtype != "float32" or len(data) != entry.nbytes or not mine:
                raise ProtocolError(f"{self.spec.rule} keeps no such state, and worker 0 loads {entry}")
            loaded.append((mine[0], entry, np.frombuffer(bytes(data), np.float32)))
        for floats in pieces:
            floats.master = floats.read(floats.own[0])
        for floats, entry, values in loaded:
            part = floats.master[entry.start - floats.piece.start : entry.stop - floats.piece.start]
            # Loading changes no parameter: a master counts where the parameter is what it rounds to.
            same = floats.read(single_to_half(values, floats.spec.dtype)) == part
            np.copyto(part, values, where=same)


class Sum(Pieces):
    """Adds what is pushed to the parameters."""

    def change(self, floats: _Floats, pushed: Array) -> None:
        np.add(floats.master, pushed, out=floats.master)


class Mean(Pieces):
    """The parameters become what is pushed, its mean over the workers."""

    def change(self, floats: _Floats, pushed: Array) -> None:
        np.copyto(floats.master, pushed)


class ArrayFunctionRule(Pieces):
    """A function of arrays, which gets flat parts of parameters."""

    def __init__(
        self, function: ArrayFunction, spec: StoreSpec, plan: StorePlan, server: int, parameters: memoryview
    ) -> None:
        super().__init__(spec, plan, server, parameters)
        self._function, self._in_force = function, OptionsInForce(spec)
        self._options: dict[str, Any] = {}

    def set_options(self, values: tuple[float, ...], bucket: int | None = None) -> None:
        self._options = self._in_force.with_numbers(values)

    def change(self, floats: _Floats, pushed: Array) -> None:
        self._function(floats.master, pushed, floats.kept, self._options)

    def _kept(self, pieces: Sequence[_Floats]) -> Iterator[Item]:
        yield from super()._kept(pieces)
        for floats in pieces:
            piece = floats.piece
            yield from kept_items(piece.tensor, floats.kept, floats.master, piece.start, floats.spec.shape)

    def load_state(self, items: Iterable[Item]) -> None:
        pieces = [each for bucket in self._floats for each in bucket]
        for floats in pieces:
            floats.kept = {}
        masters = []
        for entry, data in items:
            if entry.key == MASTER:
                masters.append((entry, memoryview(bytes(data))))
                continue
            for floats in pieces:
                load_part(floats.kept, entry, data, floats.piece)
        super().load_state(masters)


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
        here = {floats.number: floats for floats in self._floats[bucket]}
        for number, piece in enumerate(self.plan.buckets[self._server][bucket].pieces):
            floats = here.get(number)
            if floats is None:
                nbytes = DTYPES[self.plan.tensors[piece.tensor].dtype] * (piece.stop - piece.start)
                np.frombuffer(push.slot, np.uint8, nbytes, piece.offset)[:] = 0
                continue
            slot, own = floats.slot(push), floats.own[0]
            # As the worker computes: in its dtype.
            floats.put(floats.read(slot) - floats.read(own), slot)
            floats.put(floats.read(slot) * floats.master.dtype.type(self._alpha), slot)
            floats.master += floats.read(slot)
            if floats.half:
                floats.put(floats.master, own)
