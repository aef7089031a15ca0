"""State of optimizers that are not torch's own, whose entries are not known in advance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tensorwire.errors import ArgumentError
from tensorwire.store.sharding import PARAMETER_DTYPES
from tensorwire.torch.layout import Checker, OptimizerClass, Options
from tensorwire.torch.options import NOT_OPTIONS, is_number, is_numbers


class ForeignChecker(Checker):
    """Checks names, groups and options. ``numbers``, after `checked`: all numbers of the saved groups.

    Some optimizers count steps or adapt in their groups: the servers are to go on with these.
    """

    def __init__(self, optimizer_class: OptimizerClass, groups: Sequence[Options], fixed: Sequence[Options]) -> None:
        super().__init__(optimizer_class, groups, fixed)
        self.numbers: list[dict[str, bool | int | float]] = []

    def _options(self, saved: Sequence[Options]) -> list[dict[str, Any]]:
        groups = []
        for g, (theirs, fixed) in enumerate(zip(saved, self._fixed, strict=True)):
            missing = [key for key in fixed if key not in theirs]
            if missing:
                raise ArgumentError(f"group {g} of the state has no option {missing[0]!r}")
            for key, was in fixed.items():
                if is_numbers(was) and not (is_numbers(theirs[key]) and len(theirs[key]) == len(was)):
                    raise ArgumentError(f"option {key!r} is {theirs[key]!r} in the state; here it was {was!r}")
            numeric = {k for k, was in fixed.items() if is_numbers(was) or (is_number(was) and is_number(theirs[k]))}
            kept = {key: theirs[key] if key in numeric else was for key, was in fixed.items()}
            groups.append({**kept, "params": list(theirs["params"])})
        self.numbers = [{k: v for k, v in s.items() if k not in NOT_OPTIONS and is_number(v)} for s in saved]
        return groups

    def _values(self, group: int, name: str, p: torch.nn.Parameter, options: Options, found: Any) -> dict[str, Any]:
        if not p.is_floating_point() or p.numel() == 0:
            return {}  # never updated
        values = {}
        for key, value in found.items():
            if value is None:
                continue
            if isinstance(value, torch.Tensor) and str(value.dtype).removeprefix("torch.") in PARAMETER_DTYPES:
                values[key] = value.detach().to("cpu")
            elif is_number(value):
                values[key] = value
            else:
                kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
                raise ArgumentError(f"{key!r} of {name!r} is a {kind} in the state: servers take tensors and numbers")
        return values
