"""What a server does with what is pushed to keys: rules over plain arrays, and those of the store.

Sums are taken in worker order; those of float16 in float32. Nothing of this imports a framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from tensorwire._native import copy_is_large, gather
from tensorwire.errors import ProtocolError
from tensorwire.store.array_functions import (
    ArrayFunction,
    OptionsInForce,
    array_function,
    kept_items,
    load_item,
    load_part,
)
from tensorwire.store.pushes import Push
from tensorwire.store.rule_names import ASSIGN, SUM
from tensorwire.store.server_state import Stateful
from tensorwire.store.sharding import Bucket, StorePlan
from tensorwire.store.state_transfer import Item
from tensorwire.store.store_layout import StoreSpec

Array = np.ndarray[Any, Any]


def outgrows_caches(plan: StorePlan, bucket: Bucket) -> bool:
    """Whether a bucket is a part of an array for which copies had better bypass the caches."""
    return copy_is_large(plan.tensors[bucket.pieces[0].tensor].nbytes)


class KeyRule(Stateful, Protocol):
    """What a key server asks of its rule."""

    def update(self, bucket: int, pushes: Sequence[Push], options: bytes) -> None:
        """One update of a bucket by the pushes of a round, under a packed option block."""

    def assign(self, bucket: int, slot: memoryview, step: int) -> None:
        """The values of a bucket become what ``slot`` holds."""


def make_key_rule(spec: StoreSpec, plan: StorePlan, server: int, values: memoryview) -> KeyRule:
    """The rule of one server's share, whose memory is ``values``."""
    if spec.rule in _ARRAY_RULES:
        return _ARRAY_RULES[spec.rule](spec, plan, server, values)
    if function := array_function(spec):
        return _FunctionRule(function, spec, plan, server, values)
    from tensorwire.store.key_optimizers import OptimizerKeyRule  # imports torch

    return OptimizerKeyRule(spec, plan, server, values)


class _ArrayRule:
    """A rule without state, over arrays of any dtype."""

    def __init__(self, spec: StoreSpec, plan: StorePlan, server: int, values: memoryview) -> None:
        self._mean = spec.reduce == "mean"
        self._dtypes = [plan.tensors[b.pieces[0].tensor].dtype for b in plan.buckets[server]]
        buckets = plan.buckets[server]
        places = zip(buckets, self._dtypes, strict=True)
        self._values = [_array(values[b.shard : b.shard + b.nbytes], dtype) for b, dtype in places]
        self._slots: list[dict[int, Array]] = [{} for _ in buckets]  # by worker; a slot never moves

    def update(self, bucket: int, pushes: Sequence[Push], options: bytes) -> None:
        """As `KeyRule`."""
        raise NotImplementedError

    def _slot(self, bucket: int, push: Push) -> Array:
        slots = self._slots[bucket]
        if push.worker not in slots:
            slots[push.worker] = _array(push.slot, self._dtypes[bucket])
        return slots[push.worker]

    def _pushed(self, bucket: int, pushes: Sequence[Push]) -> Array:
        """The only push, in its slot, or what several come to."""
        return self._merged(bucket, pushes) if len(pushes) > 1 else self._slot(bucket, pushes[0])

    def _merged(self, bucket: int, pushes: Sequence[Push], out: Array | None = None) -> Array:
        """Two pushes or more, in ``out`` if it has the sum's dtype."""
        first, second = (self._slot(bucket, push) for push in pushes[:2])
        exact = np.float32 if first.dtype == np.float16 else first.dtype
        total = np.add(first, second, out=out if out is not None and out.dtype == exact else None, dtype=exact)
        for push in pushes[2:]:
            np.add(total, self._slot(bucket, push), out=total)
        if self._mean and total.dtype.kind == "f":
            total /= len(pushes)
        elif self._mean:
            total //= len(pushes)
        return total

    def assign(self, bucket: int, slot: memoryview, step: int) -> None:
        """As `KeyRule`."""
        np.copyto(self._values[bucket], _array(slot, self._dtypes[bucket]))

    def state(self) -> Iterator[Iterable[Item]]:
        """Nothing."""
        return iter(())

    def load_state(self, items: Iterable[Item]) -> None:
        """As `KeyRule`."""
        for entry, _ in items:
            raise ProtocolError(f"this rule keeps nothing, and worker 0 loads {entry}")


class _Sum(_ArrayRule):
    """Adds what is pushed to the values."""

    def update(self, bucket: int, pushes: Sequence[Push], options: bytes) -> None:
        value = self._values[bucket]
        np.add(value, self._pushed(bucket, pushes), out=value, casting="same_kind")


class _Assign(_ArrayRule):
    """The values become what is pushed."""

    def __init__(self, spec: StoreSpec, plan: StorePlan, server: int, values: memoryview) -> None:
        super().__init__(spec, plan, server, values)
        self._large = [outgrows_caches(plan, bucket) for bucket in plan.buckets[server]]

    def update(self, bucket: int, pushes: Sequence[Push], options: bytes) -> None:
        value = self._values[bucket]
        if len(pushes) == 1:
            gather(value, self._slot(bucket, pushes[0]), self._large[bucket])
        elif (merged := self._merged(bucket, pushes, value)) is not value:
            np.copyto(value, merged, casting="same_kind")


class _FunctionRule(_ArrayRule):
    """A function of arrays, and what it keeps for each bucket: a whole key, or a flat part of one."""

    def __init__(
        self, function: ArrayFunction, spec: StoreSpec, plan: StorePlan, server: int, values: memoryview
    ) -> None:
        super().__init__(spec, plan, server, values)
        self._plan, self._whole = plan, spec.whole
        self._pieces = [b.pieces[0] for b in plan.buckets[server]]
        # A bucket may end with bytes that are nobody's.
        flat = [v[: p.stop - p.start] for v, p in zip(self._values, self._pieces, strict=True)]
        shapes = [plan.tensors[piece.tensor].shape for piece in self._pieces]
        self._shaped = [v.reshape(s) for v, s in zip(flat, shapes, strict=True)] if spec.whole else flat
        self._state: list[dict[str, Any]] = [{} for _ in self._pieces]
        self._function, self._options = function, OptionsInForce(spec)

    def update(self, bucket: int, pushes: Sequence[Push], options: bytes) -> None:
        """As `KeyRule`."""
        value = self._shaped[bucket]
        gradient = self._pushed(bucket, pushes)[: value.size].reshape(value.shape).astype(value.dtype, copy=False)
        self._function(value, gradient, self._state[bucket], self._options.of(options))

    def state(self) -> Iterator[Iterable[Item]]:
        """What the function keeps: arrays and numbers."""
        for piece, state, value in zip(self._pieces, self._state, self._shaped, strict=True):
            shape = None if self._whole else self._plan.tensors[piece.tensor].shape
            yield kept_items(piece.tensor, state, value, piece.start, shape)

    def load_state(self, items: Iterable[Item]) -> None:
        """As `KeyRule`."""
        loaded: list[dict[str, Any]] = [{} for _ in self._pieces]
        for entry, data in items:
            for piece, state in zip(self._pieces, loaded, strict=True):
                if not self._whole:
                    load_part(state, entry, data, piece)
                elif piece.tensor == entry.tensor:
                    load_item(state, entry, data)
        self._state = loaded


_ARRAY_RULES = {SUM: _Sum, ASSIGN: _Assign}


def _array(memory: memoryview, dtype: str) -> Array:
    return np.frombuffer(memory, dtype)
