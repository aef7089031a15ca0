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
from tensorwire.torch.roots import Root, find_roots, named_parameters

_SECONDS = 600.0  # for the other workers, which construct the same optimizer
_NAMED = 3
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def make_equal(worker: Worker, optimizer: torch.optim.Optimizer, modules: Sequence[torch.nn.Module]) -> None:
    """Buffers and left-out parameters of the models whose parameters ``optimizer`` has become worker 0's.

    ``modules``: the model's, or all of the process. Raises `WaitTimeout` or `JobEnded`.
    """
    _optimizers.add(optimizer)
    if worker.num_workers == 1:
        return
    found = _others(find_roots(named_parameters(optimizer), modules))
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
