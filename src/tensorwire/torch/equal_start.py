"""Gives all workers worker 0's untrained parameters and buffers at the start.

As in `DistributedDataParallel`, these are frozen layers, random projections, codebooks; but only differing values
travel.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from tensorwire.errors import ArgumentError
from tensorwire.launch import Worker
from tensorwire.launch.first_values import Outline, first_values, outline
from tensorwire.launch.values import tensor_bytes
from tensorwire.sizes import listed
from tensorwire.torch.arguments import is_on_accelerator
from tensorwire.torch.roots import Root, find_roots, named_parameters

_SECONDS = 600.0  # for the other workers, which construct the same optimizer
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def make_equal(worker: Worker, optimizer: torch.optim.Optimizer, modules: Sequence[torch.nn.Module]) -> None:
    """Buffers and left-out parameters of the models whose parameters ``optimizer`` has become worker 0's.

    ``modules``: the model's, or all of the process. Raises `WaitTimeout` or `JobEnded`.
    """
    _optimizers.add(optimizer)
    if worker.num_workers == 1 or worker.joins:
        return
    found = _others(find_roots(named_parameters(optimizer), modules))
    mine: dict[str, Outline] = {}
    refused: dict[str, str] = {}
    for name, tensor in found.items():
        try:
            mine[name] = outline(str(tensor.dtype), tensor.shape, tensor_bytes(_here(tensor), "job.broadcast").data)
        except ArgumentError as error:
            refused[name] = str(error)
    first = first_values(worker, mine, lambda name: _here(found[name].detach()), _SECONDS)
    with torch.no_grad():
        for name, value in first.values.items():
            found[name].copy_(value)
    if refused and worker.rank == 0:
        _warn(refused, f"do not become worker 0's at the start: {next(iter(refused.values()))}")
    unlike = [n for n in first.names if n in mine and n not in first.alike]
    _warn(unlike, "have another shape or dtype than worker 0's, and stay")


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """The same on the CPU; what has no memory anywhere stays as it is."""
    return tensor.detach().cpu() if is_on_accelerator(tensor) else tensor


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
    if named := listed([*map(repr, names)]):
        warnings.warn(f"{named} {what}", UserWarning, stacklevel=4)
