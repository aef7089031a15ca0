"""What a model has besides the parameters that are trained is equal on all workers at the start: worker 0's.

Frozen layers, random projections, codebooks: as `DistributedDataParallel` does, but only what differs travels.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch

from tensorwire.errors import ArgumentError
from tensorwire.launch import Worker
from tensorwire.launch.values import tensor_bytes

_SECONDS = 600.0  # for the other workers, which construct the same optimizer
_NAMED = 3
Root = tuple[str, torch.nn.Module]  # what comes before the names in it, and the module
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def make_equal(worker: Worker, optimizer: torch.optim.Optimizer, modules: Sequence[torch.nn.Module]) -> None:
    """Buffers and left-out parameters of the models whose parameters ``optimizer`` has become worker 0's.

    ``modules``: the model's, or all of the process. Raises `WaitTimeout` or `JobEnded`.
    """
    _optimizers.add(optimizer)
    if worker.num_workers == 1:
        return
    found = _others(find_roots(_named(optimizer), modules))
    mine: dict[str, list[object]] = {}
    refused: dict[str, str] = {}
    for name, tensor in found.items():
        try:
            digest = hashlib.sha256(tensor_bytes(tensor, "job.broadcast").data).digest()
            mine[name] = [str(tensor.dtype), list(tensor.shape), digest]
        except ArgumentError as error:
            refused[name] = str(error)
    meet = worker.collectives
    theirs = meet.broadcast(mine, 0, _SECONDS)
    alike = [n for n in theirs if n in mine and mine[n][:2] == theirs[n][:2]]
    differ = {n for n in alike if mine[n] != theirs[n]}
    wanted = meet.all_reduce(np.array([0, *(n in differ for n in theirs)], np.int64), "max", _SECONDS)[1:]
    names = [n for n, anybody in zip(theirs, wanted, strict=True) if anybody]
    if names:
        values = meet.broadcast([found[n].detach() for n in names] if worker.rank == 0 else None, 0, _SECONDS)
        with torch.no_grad():
            for name, value in zip(names, values, strict=True):
                if name in differ:
                    found[name].copy_(value)
    if refused and worker.rank == 0:
        _warn(refused, f"do not become worker 0's at the start: {next(iter(refused.values()))}")
    _warn([n for n in theirs if n in mine and n not in alike], "have another shape or dtype than worker 0's, and stay")


def find_roots(named: Iterable[tuple[str, torch.nn.Parameter]], modules: Iterable[torch.nn.Module]) -> list[Root]:
    """The outermost of ``modules`` in which the parameters have the names that were given, after a common prefix.

    And for parameters with other names than in any module: the outermost that has them.
    """
    names = {id(p): name for name, p in named}
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
    roots = _outermost(roots)
    inside = {id(p) for _, module in roots for p in module.parameters()}
    return roots + _outermost([r for r in others if any(id(p) in names.keys() - inside for p in r[1].parameters())])


def _named(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    groups = optimizer.param_groups
    return [pair for g in groups for pair in zip(g["param_names"], g["params"], strict=True)]


def _outermost(roots: list[Root]) -> list[Root]:
    inner = {id(m) for _, module in roots for m in module.modules() if m is not module}
    return [(prefix, module) for prefix, module in roots if id(module) not in inner]


def _others(roots: Iterable[Root]) -> dict[str, torch.Tensor]:
    """By name: what no optimizer of the store's has, and is here."""
    trained = {id(p) for o in _optimizers for group in o.param_groups for p in group["params"]}
    found: dict[str, torch.Tensor] = {}
    for prefix, module in roots:
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if id(tensor) not in trained and not hasattr(tensor, "_tensorwire"):  # a stand-in for one elsewhere
                found.setdefault(prefix + name, tensor)
    return found


def _warn(names: Iterable[str], what: str) -> None:
    listed = list(names)
    if listed:
        more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
        warnings.warn(f"{', '.join(map(repr, listed[:_NAMED]))}{more} {what}", UserWarning, stacklevel=4)
