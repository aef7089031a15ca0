"""Options of parameter groups: numbers are sent with every step, the others are fixed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.store.rule_names import WHOLE
from tensorwire.store.rules import IMPLEMENTATION

# Group entries that are not options of the optimizer.
NOT_OPTIONS = ("params", "param_names")


def defaults(optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """The class's own defaults and validation, at the price of one element. Raises `ArgumentError`."""
    known = inspect.signature(optimizer_class).parameters
    unknown = [k for k in options if k not in known]
    if unknown:
        raise ArgumentError(f"{optimizer_class.__name__} has no option {unknown[0]!r}")
    try:
        shape = (1, 1) if optimizer_class.__name__ == "Muon" else (1,)
        return dict(optimizer_class([torch.nn.Parameter(torch.zeros(shape))], **options).defaults)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ArgumentError(f"{optimizer_class.__name__}: {error}") from None


def known(optimizer_class: type[torch.optim.Optimizer], group: dict[str, Any]) -> dict[str, Any]:
    """Those of a group's entries that the class's constructor takes: some it derives itself, or schedulers add."""
    names = inspect.signature(optimizer_class).parameters
    return {k: v for k, v in group.items() if k in names and k != "params"}


def check_groups(optimizer_class: type[torch.optim.Optimizer], groups: Sequence[dict[str, Any]]) -> None:
    """Raises `ArgumentError` for groups of torch's own optimizers that servers could not build one from."""
    for number, group in enumerate(groups):
        # Those that look at whole tensors have something to say about their shapes, too.
        whole = optimizer_class.__name__ in WHOLE
        params = group["params"] if whole else [torch.nn.Parameter(torch.zeros(1))]
        if not params:
            continue
        try:
            optimizer_class(list(params), **known(optimizer_class, group))
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise ArgumentError(f"{optimizer_class.__name__}, parameter group {number}: {error}") from None


def plain(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups' options as they can travel without pickle. Raises `Unsupported`."""
    return [{k: _plain(k, v) for k, v in group.items() if k not in NOT_OPTIONS} for group in groups]


def numeric(groups: Sequence[dict[str, Any]]) -> list[tuple[int, str, int]]:
    """Which options are numbers that may change from step to step: (group, option, index; -1 for a plain number)."""
    found = []
    for g, group in enumerate(groups):
        for key in sorted(group):
            if key in IMPLEMENTATION:
                continue
            if is_number(group[key]):
                found.append((g, key, -1))
            elif is_numbers(group[key]):
                found.extend((g, key, i) for i in range(len(group[key])))
    return found


def check(groups: Sequence[dict[str, Any]], fixed: Sequence[dict[str, Any]]) -> None:
    """Raises `Unsupported` if an option that is not a number is not what it was, `ArgumentError` if one is gone."""
    for group, before in zip(groups, fixed, strict=True):
        for key, was in before.items():
            if key not in group:
                raise ArgumentError(f"option {key!r} was deleted from a parameter group: set it to what it should be")
            if not is_number(was) and not is_numbers(was) and _plain(key, group[key]) != was:
                raise Unsupported(f"option {key!r} was {was!r} at construction and cannot become {group[key]!r}")


def values(groups: Sequence[dict[str, Any]], places: Sequence[tuple[int, str, int]]) -> list[float]:
    """The numbers at ``places``. Raises `Unsupported` for anything else there, `ArgumentError` for one too large."""
    found = []
    for g, key, index in places:
        value = groups[g][key]
        if index >= 0:
            value = value[index] if isinstance(value, (tuple, list)) and index < len(value) else None
        if not is_number(value):
            raise Unsupported(
                f"option {key!r} must stay a plain number, or as many numbers as it had, not {groups[g][key]!r}"
            )
        try:
            found.append(float(value))
        except OverflowError:
            raise ArgumentError(f"option {key!r} is larger than a float64 can be") from None
    return found


def is_number(value: Any) -> bool:
    """Whether an option is one number; True and False are, too."""
    return isinstance(value, (bool, int, float))


def is_numbers(value: Any) -> bool:
    """Whether an option is a sequence of numbers."""
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(is_number(v) for v in value)


def plain_value(key: str, value: Any) -> Any:
    """One option as it can travel without pickle. Raises `Unsupported`."""
    return _plain(key, value)


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_plain(key, v) for v in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise Unsupported(f"option {key!r} is a {type(value).__name__}; servers take numbers, strings and None")
