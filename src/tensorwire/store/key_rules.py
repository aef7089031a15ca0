"""What a server does with pushes to keys: the rules of a store, in rounds of one key."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from tensorwire._native import copy_is_large, gather
from tensorwire.errors import ArgumentError
from tensorwire.store.arithmetic import ArrayFunction, assign
from tensorwire.store.arithmetic_rules import Pieces, Rule
from tensorwire.store.find_rule import array_function
from tensorwire.store.pushes import Push
from tensorwire.store.rule_names import is_foreign
from tensorwire.store.sharding import Bucket, StorePlan
from tensorwire.store.store_layout import StoreSpec


def outgrows_caches(plan: StorePlan, bucket: Bucket) -> bool:
    """Whether a bucket is a part of an array for which copies had better bypass the caches."""
    return copy_is_large(plan.tensors[bucket.pieces[0].tensor].nbytes)


def make_key_rule(spec: StoreSpec, plan: StorePlan, server: int, values: memoryview) -> Rule:
    """The rule of one server's share, whose memory is ``values``. Raises `ArgumentError` for a wrong name or option."""
    if function := array_function(spec):
        return _KeyArrays(spec, plan, server, values, function)
    from tensorwire.store.rules import OptimizerRule, optimizer_class  # imports torch

    known = inspect.signature(optimizer_class(spec)).parameters
    if strange := [name for name in spec.groups[0] if name not in known and not is_foreign(spec.rule)]:
        raise ArgumentError(f"the optimizer {spec.rule} has no option {strange[0]!r}")
    try:
        return OptimizerRule(spec, plan, server, values)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the optimizer {spec.rule} refuses its options: {error}") from None


class _KeyArrays(Pieces):
    """A function of arrays of any dtype: each bucket is a key, or a flat part of one, and has no master."""

    def __init__(
        self, spec: StoreSpec, plan: StorePlan, server: int, values: memoryview, function: ArrayFunction
    ) -> None:
        super().__init__(spec, plan, server, values, function)
        self._large = [outgrows_caches(plan, bucket) for bucket in plan.buckets[server]]
        for (value,) in self._values if function is assign else ():
            if value.spec.dtype != "float16":  # whose sums have another dtype
                value.room = value.master

    def update(self, bucket: int, pushes: Sequence[Push], options: bytes) -> None:
        if self._function is assign and len(pushes) == 1:
            (value,) = self._values[bucket]
            gather(value.master, value.slot(pushes[0]), self._large[bucket])
        else:
            super().update(bucket, pushes, options)
