"""Rules for keys that need torch: its optimizers, and optimizers and functions of tensors that import paths name."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Sequence

from tensorwire.errors import ArgumentError
from tensorwire.store.pushes import Push
from tensorwire.store.rule_names import ELEMENTWISE, WHOLE, is_foreign, no_rule
from tensorwire.store.rules import OptimizerRule, optimizer_class
from tensorwire.store.sharding import StorePlan
from tensorwire.store.store_layout import StoreSpec


class OptimizerKeyRule:
    """A rule of the store: torch's optimizers, and what import paths name."""

    def __init__(self, spec: StoreSpec, plan: StorePlan, server: int, values: memoryview) -> None:
        if spec.rule in ELEMENTWISE + WHOLE:
            known = inspect.signature(optimizer_class(spec)).parameters
            if strange := [name for name in spec.groups[0] if name not in known]:
                raise ArgumentError(f"the optimizer {spec.rule} has no option {strange[0]!r}")
        elif not is_foreign(spec.rule):
            raise no_rule(spec.rule)
        try:
            self._rule = OptimizerRule(spec, plan, server, values)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"the optimizer {spec.rule} refuses its options: {error}") from None
        self._mean = spec.reduce == "mean"
        self.assign, self.state, self.load_state = self._rule.assign, self._rule.state, self._rule.load_state

    def update(self, bucket: int, pushes: Sequence[Push], options: bytes) -> None:
        """As `KeyRule`."""
        self._rule.set_options(struct.unpack(f"<{len(options) // 8}d", options), bucket)
        self._rule.reduce(bucket, pushes, float(len(pushes)) if self._mean else 1.0, keep=True)
        self._rule.apply(bucket, 0)
