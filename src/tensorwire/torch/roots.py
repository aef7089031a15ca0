"""Finds the models of an optimizer's parameters by their names: PyTorch has no way from one to the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tensorwire.errors import ArgumentError
from tensorwire.torch.loading import find_modules

Root = tuple[str, torch.nn.Module]  # what comes before the names in it, and the module


def find_roots(named: Iterable[tuple[str, torch.nn.Parameter]], modules: Iterable[torch.nn.Module]) -> list[Root]:
    """The outermost of ``modules`` in which the parameters have the names that were given, after a common prefix.

    And for parameters with other names than in any module: the outermost that has them.
    """
    names = {id(p): name for name, p in named}
    roots, others = _apart(names, modules)
    inside = {id(p) for _, module in roots for p in module.parameters()}
    return roots + _outermost([r for r in others if any(id(p) in names.keys() - inside for p in r[1].parameters())])


def _apart(names: dict[int, str], modules: Iterable[torch.nn.Module]) -> tuple[list[Root], list[Root]]:
    """The outermost in which parameters have these names, and all in which they have others."""
    roots: list[Root] = []
    others: list[Root] = []
    for module in modules:
        local = [(n, p) for n, p in module.named_parameters(remove_duplicate=False) if id(p) in names]
        if not local:
            continue
        fitting: dict[int, set[str]] = {}
        for name, p in local:  # one that is tied has several names
            before, _, after = names[id(p)].rpartition(name)
            fitting.setdefault(id(p), set()).update([before] if not after and before[-1:] in ("", ".") else [])
        if common := set.intersection(*fitting.values()):
            roots.append((min(common), module))
        else:
            others.append((f"(with {names[id(local[0][1])]}) ", module))
    return _outermost(roots), others


def named_parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    """The (name, parameter) pairs of all groups."""
    groups = optimizer.param_groups
    return [pair for g in groups for pair in zip(g["param_names"], g["params"], strict=True)]


def with_names(group: Any, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> Any:
    """``group`` with (name, parameter) pairs, where a library gives it parameters alone. Raises `ArgumentError`."""
    params = group.get("params") if isinstance(group, dict) else None
    if not isinstance(params, Iterable) or isinstance(params, (set, torch.nn.Module)):
        return group
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    bare = [p for p in given if isinstance(p, torch.Tensor)]
    if not bare:
        return {**group, "params": given}
    named = named_parameters(optimizer)
    modules = find_modules([*(p for _, p in named), *bare], model)
    roots, others = _apart({id(p): name for name, p in named}, modules)
    names = _names(roots)
    if missing := {id(p) for p in bare} - names.keys():  # the names are those of a part, such as a model's head
        wider = [("", module) for _, module in others if any(id(p) in missing for p in module.parameters())]
        names = _names(_outermost(wider)) | names
    for p in bare:
        if id(p) not in names:
            raise ArgumentError(
                f"a parameter {list(p.shape)} of the new group has no name, and is in no model of this optimizer's: "
                'pass names, {"params": list(layer.named_parameters("layer"))}'
            )
    return {**group, "params": [(names[id(p)], p) if isinstance(p, torch.Tensor) else p for p in given]}


def _names(roots: Iterable[Root]) -> dict[int, str]:
    """Of all parameters; of several names the first in the alphabet, which is the same on all workers."""
    found: dict[int, str] = {}
    for prefix, root in roots:
        for name, p in root.named_parameters():
            found[id(p)] = min(prefix + name, found.get(id(p), prefix + name))
    return found


def _outermost(roots: list[Root]) -> list[Root]:
    inner = {id(m) for _, module in roots for m in module.modules() if m is not module}
    return [(prefix, module) for prefix, module in roots if id(module) not in inner]
