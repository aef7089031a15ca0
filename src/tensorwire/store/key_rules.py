"""What a server does with what is pushed to keys: rules over plain arrays, and those of the store.

Sums are taken in worker order; those of float16 in float32.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from tensorwire.errors import ArgumentError, ProtocolError
from tensorwire.store.rule_names import ASSIGN, ELEMENTWISE, SUM, WHOLE, is_foreign, no_rule
from tensorwire.store.rules import Push, make_rule, optimizer_class
from tensorwire.store.server_state import Stateful
from tensorwire.store.sharding import StorePlan
from tensorwire.store.state_transfer import Item
from tensorwire.store.store_layout import StoreSpec

Array = np.ndarray[Any, Any]


class KeyRule(Stateful, Protocol):
    """What a key server asks of its rule."""

    def update(self, bucket: int, pushes: Sequence[Push], options: bytes) -> None:
        """One update of a bucket by the pushes of a round, under a packed option block."""

    def assign(self, bucket: int, slot: memoryview, step: int) -> None:
        """The values of a bucket become what ``slot`` holds."""


def make_key_rule(spec: StoreSpec, plan: StorePlan, server: int, values: memoryview) -> KeyRule:
    """The rule of one server's share, whose memory is ``values``."""
    kind = _ARRAY_RULES.get(spec.rule, _StoreRule)
    return kind(spec, plan, server, values)


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
        value, pushed = self._values[bucket], self._slot(bucket, pushes[0])
        if len(pushes) > 1:
            pushed = self._merged(bucket, pushes)
        self.change(value, pushed)

    def _slot(self, bucket: int, push: Push) -> Array:
        slots = self._slots[bucket]
        if push.worker not in slots:
            slots[push.worker] = _array(push.slot, self._dtypes[bucket])
        return slots[push.worker]

    def _merged(self, bucket: int, pushes: Sequence[Push]) -> Array:
        first = self._slot(bucket, pushes[0])
        total = first.astype(np.float32 if first.dtype == np.float16 else first.dtype)
        for push in pushes[1:]:
            np.add(total, self._slot(bucket, push), out=total)
        if self._mean and total.dtype.kind == "f":
            total /= len(pushes)
        elif self._mean:
            total //= len(pushes)
        return total

    def change(self, value: Array, pushed: Array) -> None:
        """Changes a bucket's values in place."""
        raise NotImplementedError

    def assign(self, bucket: int, slot: memoryview, step: int) -> None:
        """As `KeyRule`."""
        np.copyto(self._values[bucket], _array(slot, self._dtypes[bucket]))

    def state(self) -> Iterator[Item]:
        """Nothing."""
        return iter(())

    def load_state(self, items: Iterable[Item]) -> None:
        """As `KeyRule`."""
        for entry, _ in items:
            raise ProtocolError(f"this rule keeps nothing, and worker 0 loads {entry}")


class _Sum(_ArrayRule):
    """Adds what is pushed to the values."""

    def change(self, value: Array, pushed: Array) -> None:
        np.add(value, pushed, out=value, casting="same_kind")


class _Assign(_ArrayRule):
    """The values become what is pushed."""

    def change(self, value: Array, pushed: Array) -> None:
        np.copyto(value, pushed, casting="same_kind")


class _StoreRule:
    """A rule of the store: torch's optimizers, and what import paths name."""

    def __init__(self, spec: StoreSpec, plan: StorePlan, server: int, values: memoryview) -> None:
        if spec.rule in ELEMENTWISE + WHOLE:
            known = inspect.signature(optimizer_class(spec)).parameters
            if strange := [name for name in spec.groups[0] if name not in known]:
                raise ArgumentError(f"the optimizer {spec.rule} has no option {strange[0]!r}")
        elif not is_foreign(spec.rule):
            raise no_rule(spec.rule)
        try:
            self._rule = make_rule(spec, plan, server, values)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"the optimizer {spec.rule} refuses its options: {error}") from None
        self._mean = spec.reduce == "mean"
        self.assign, self.state, self.load_state = self._rule.assign, self._rule.state, self._rule.load_state

    def update(self, bucket: int, pushes: Sequence[Push], options: bytes) -> None:
        """As `KeyRule`."""
        self._rule.set_options(struct.unpack(f"<{len(options) // 8}d", options), bucket)
        self._rule.reduce(bucket, pushes, float(len(pushes)) if self._mean else 1.0, keep=True)
        self._rule.apply(bucket, 0)


_ARRAY_RULES = {SUM: _Sum, ASSIGN: _Assign}


def _array(memory: memoryview, dtype: str) -> Array:
    return np.frombuffer(memory, dtype)
