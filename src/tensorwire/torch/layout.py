"""The state that an optimizer keeps for a parameter, and whether state to be loaded fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tensorwire.errors import ArgumentError
from tensorwire.store.rules import IMPLEMENTATION, is_whole
from tensorwire.store.state_transfer import MASTER
from tensorwire.torch.options import known

OptimizerClass = type[torch.optim.Optimizer]
Options = Mapping[str, Any]  # of one parameter group
Values = dict[str, torch.Tensor]  # of one parameter, by key
_HALF = (torch.bfloat16, torch.float16)


def build(optimizer_class: OptimizerClass, groups: Sequence[Options]) -> torch.optim.Optimizer:
    """A stock optimizer of such groups."""
    return optimizer_class([dict(group) for group in groups], **known(optimizer_class, dict(groups[0])))


@dataclass(frozen=True)
class Layout:
    """One value of a parameter's state. ``rows``: it has an element for each of the parameter's, and is cut with it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: bool


def layouts(
    optimizer_class: OptimizerClass, options: Options, shape: Sequence[int], dtype: torch.dtype
) -> tuple[dict[str, Layout], bool]:
    """What the class keeps for such a parameter, and whether from its construction on: found on a small probe."""
    whole = is_whole(optimizer_class.__name__)
    small = tuple(min(n, 2) for n in shape) if whole else (2,)
    probe = torch.nn.Parameter(torch.zeros(small, dtype=dtype))
    made = build(optimizer_class, [{**options, "params": [probe]}])
    at_once = bool(made.state.get(probe))
    probe.grad = torch.ones_like(probe)
    made.step()
    found = {}
    for key, value in made.state.get(probe, {}).items():
        rows = not whole and value.dim() > 0
        full = tuple(shape) if rows else tuple(n if s > 1 else 1 for s, n in zip(value.shape, shape, strict=False))
        found[key] = Layout(full, value.dtype, rows)
    return found, at_once


class Checker:
    """What a state has to fit.

    ``groups``: the optimizer's present groups, with ``param_names``; ``fixed``: each group's options at construction.
    """

    def __init__(self, optimizer_class: OptimizerClass, groups: Sequence[Options], fixed: Sequence[Options]) -> None:
        self._class, self._groups, self._fixed = optimizer_class, groups, fixed
        self._found: dict[Any, tuple[dict[str, Layout], bool]] = {}  # layouts seen before

    def checked(self, state_dict: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[torch.Tensor, Values]]:
        """The groups and the state that loading ``state_dict`` would give. Raises `ArgumentError`; changes nothing."""
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            raise ArgumentError("not the state_dict of an optimizer: it has no 'state' and 'param_groups'")
        saved = state_dict["param_groups"]
        self._check_groups(saved)
        groups = self._options(saved)
        state: dict[torch.Tensor, Values] = {}
        known = set()
        for g, (ours, theirs) in enumerate(zip(self._groups, saved, strict=True)):
            for name, p, index in zip(ours["param_names"], ours["params"], theirs["params"], strict=True):
                known.add(index)
                values = self._values(g, name, p, groups[g], state_dict["state"].get(index, {}))
                if values:
                    state[p] = values
        unknown = [k for k in state_dict["state"] if k not in known]
        if unknown:
            raise ArgumentError(f"the state has an entry for parameter {unknown[0]!r}, which is in none of its groups")
        return groups, state

    def _check_groups(self, saved: Any) -> None:
        if len(saved) != len(self._groups):
            raise ArgumentError(f"the state has {len(saved)} parameter groups, this optimizer {len(self._groups)}")
        for g, (ours, theirs) in enumerate(zip(self._groups, saved, strict=True)):
            if len(theirs["params"]) != len(ours["params"]):
                raise ArgumentError(
                    f"group {g} of the state has {len(theirs['params'])} parameters, here it has {len(ours['params'])}"
                )
            names = theirs.get("param_names", ours["param_names"])
            for name, other in zip(ours["param_names"], names, strict=False):
                if name != other:
                    raise ArgumentError(f"the state in the place of parameter {name!r} is that of {other!r}")

    def _options(self, saved: Sequence[Options]) -> list[dict[str, Any]]:
        """The saved groups as the class itself would take them, with our implementation."""
        empty = [{**f, "params": [torch.nn.Parameter(torch.zeros(2, 2)) for _ in s["params"]]}
                 for f, s in zip(self._fixed, saved, strict=True)]  # fmt: skip
        made = build(self._class, empty)
        made.load_state_dict({"state": {}, "param_groups": list(saved)})  # fills in what older versions did not have
        groups = []
        for g, (found, theirs, fixed) in enumerate(zip(made.param_groups, saved, self._fixed, strict=True)):
            group = {**found, "params": list(theirs["params"])}
            for key, was in fixed.items():
                if key in IMPLEMENTATION:
                    group[key] = was  # how it is computed is the store's
                elif key not in group:
                    raise ArgumentError(f"group {g} of the state has no option {key!r}")
                elif not _alike(group[key], was):
                    raise ArgumentError(f"option {key!r} is {group[key]!r} in the state; here it was {was!r}")
            try:
                build(self._class, [{**group, "params": [torch.nn.Parameter(torch.zeros(2, 2))]}])
            except (ValueError, TypeError, RuntimeError) as error:
                raise ArgumentError(f"group {g} of the state: {error}") from None
            groups.append(group)
        return groups

    def _layouts(self, group: int, options: Options, p: torch.nn.Parameter) -> tuple[dict[str, Layout], bool]:
        dtype = torch.float32 if p.dtype in _HALF else p.dtype
        key = (group, options is self._fixed[group], p.shape, dtype)
        if key not in self._found:
            self._found[key] = layouts(self._class, options, p.shape, dtype)
        return self._found[key]

    def _values(self, group: int, name: str, p: torch.nn.Parameter, options: Options, found: Any) -> Values:
        """One parameter's state, in the types that the servers keep."""
        if not p.is_floating_point() or p.numel() == 0:
            return {}  # never updated
        needed, at_once = self._layouts(group, options, p)
        allowed = {**self._layouts(group, self._fixed[group], p)[0], **needed}
        if p.dtype in _HALF:
            allowed[MASTER] = Layout(tuple(p.shape), torch.float32, True)
        values = {}
        for key, value in found.items():
            if value is None:
                continue
            if key not in allowed:
                raise ArgumentError(f"the state of {name!r} has {key!r}, which {self._class.__name__} does not keep")
            values[key] = _converted(f"{key!r} of {name!r}", value, allowed[key])
        missing = [k for k in needed if k not in values]
        if missing and (at_once or values.keys() - {MASTER}):
            raise ArgumentError(f"the state of {name!r} has no {missing[0]!r}, which {self._class.__name__} needs")
        return values


def _converted(what: str, value: Any, layout: Layout) -> torch.Tensor:
    if isinstance(value, (bool, int, float)) and layout.shape == ():
        return torch.tensor(float(value), dtype=layout.dtype)  # as older versions of torch kept ``step``
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise ArgumentError(f"{what} is of {kind} in the state, and should be of {layout.dtype}")
    if value.shape != layout.shape:
        raise ArgumentError(f"{what} has the shape {list(value.shape)} in the state, here {list(layout.shape)}")
    if value.dim() and torch.promote_types(value.dtype, layout.dtype) != layout.dtype:
        raise ArgumentError(f"{what} is of {value.dtype} in the state; {layout.dtype} would lose some of it")
    return value.detach().to("cpu", layout.dtype)


def _alike(value: Any, was: Any) -> bool:
    """Whether an option may become ``value``: numbers may become other numbers."""
    if isinstance(was, (tuple, list)):
        return isinstance(value, (tuple, list)) and len(value) == len(was) and all(map(_alike, value, was))
    if isinstance(was, (bool, int, float)):
        return isinstance(value, (bool, int, float))
    return bool(value == was)
