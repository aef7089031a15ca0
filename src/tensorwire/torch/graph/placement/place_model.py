"""``place`` and ``unplace`` assign modules to workers and free the memory of modules that run elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.graph.ir import worker_name
from tensorwire.launch import current_worker
from tensorwire.torch.graph import check_torch
from tensorwire.torch.graph.placement.compile_check import unwatch, watch
from tensorwire.torch.graph.placement.placed_models import (
    Ranks,
    forget,
    known,
    owner_of,
    rank_of,
    register,
    unwrapped,
    was_alone,
)
from tensorwire.torch.graph.placement.remote_tensor import location_of, release, restore

_ADVICE = (
    "this process is {}. What Python reads in a model, as item() does, is not part of the graph: compute with the "
    "tensor instead. If the model did not mean to, dynamo left this part out: TORCH_LOGS=graph_breaks says why"
)
M = TypeVar("M", bound=torch.nn.Module)


def place(model: M, workers: Ranks, *, worker: int | str | None = None) -> M:
    """Decides which worker runs which module of ``model``, and keeps only this worker's parameters and buffers.

    Call it on every worker, after loading and before ``torch.compile(model, backend="tensorwire")``. If the model ran
    compiled before, everything that torch has compiled in this process is dropped, and compiled again by the next call.

    A parameter of another worker keeps name, shape and dtype, takes no memory, and raises `NotOnThisWorker` when it is
    read; optimizers skip it, as it has no gradient. A tensor that several modules share lives with the first of them.
    From here on, a placed module that runs uncompiled raises `Unsupported`: see `unplace`.

    Args:
        model: Its parameters and buffers are plain tensors on the CPU, of any shape and dtype.
        workers: The rank of each module's worker, such as ``{"": 0, "layers.2": 1}`` (``"worker:1"`` means the same as
            ``1``): by dotted path, as in ``named_modules()``, which covers everything below it; ``""`` is the rest.
            All workers keep modules without a worker.
        worker: This process's own rank; by default that of its place in the job.

    Returns:
        ``model``.

    Raises:
        ArgumentError: A name fits nothing, or the model was placed before. The model is unchanged.
        Unsupported: A parameter or buffer is not a plain tensor on the CPU, or torch is older than 2.11. The model is
            unchanged.
    """
    check_torch()
    inner = unwrapped(model)
    mine = _own_worker(worker, workers)
    _check_tensors(inner)
    if known(inner) is not None:
        raise ArgumentError(
            "this model already has its workers, from place() or from the options of torch.compile: place it once, "
            "before the first compiled call, and without options={'workers': ...}; unplace(model) takes them back"
        )
    register(inner, workers)
    if was_alone(inner) and torch._guards.TracingContext.try_get() is None:  # it would run on every worker
        torch.compiler.reset()
    watch(inner)
    for tensor in (*inner.parameters(), *inner.buffers()):
        owner = owner_of(tensor)
        if owner is not None and owner.worker not in (None, mine) and location_of(tensor) is None:
            release(tensor, owner.name, str(owner.worker), advice=_ADVICE.format(mine))
    return model


def unplace(model: M, state: Mapping[str, torch.Tensor] | None = None) -> M:
    """Undoes `place`: the model runs uncompiled again, in this process alone, as for an export.

    Args:
        model: The model that `place` was given.
        state: The values of the parameters and buffers that live on other workers, by name, as in ``state_dict()``; of
            the shape and dtype that each has here.

    Returns:
        ``model``.

    Raises:
        ArgumentError: The model was not placed; or a value is missing or does not fit. The model is unchanged.
    """
    inner = unwrapped(model)
    if known(inner) is None:
        raise ArgumentError("this model was not placed: pass unplace() the model that was passed to place()")
    values = []
    for name, tensor in (*inner.named_parameters(), *inner.named_buffers()):
        if (where := location_of(tensor)) is not None:
            value = (state or {}).get(name)
            if value is None:
                raise ArgumentError(f"{name} is on {where.worker}: unplace(model, state) needs its value in state")
            if value.shape != tensor.shape or value.dtype != tensor.dtype or location_of(value) is not None:
                raise ArgumentError(
                    f"{name} is {list(tensor.shape)} of {tensor.dtype}; in state it is "
                    + (
                        f"on {gone.worker} too"
                        if (gone := location_of(value))
                        else f"{list(value.shape)} of {value.dtype}"
                    )
                )
            values.append((tensor, value))
    unwatch(inner)
    forget(inner)
    for tensor, value in values:
        restore(tensor, value)
    return model


def _own_worker(worker: int | str | None, workers: Ranks) -> str:
    if worker is not None:
        return worker_name(rank_of(worker))
    here = current_worker()
    for rank in map(rank_of, workers.values() if isinstance(workers, Mapping) else ()):  # the rest is refused later
        if rank >= here.num_workers:
            raise ArgumentError(
                f"there is no {worker_name(rank)}: this job has {here.num_workers} "
                f"worker{'s' * (here.num_workers > 1)}; give ranks below {here.num_workers}, or start more workers"
            )
    return worker_name(here.rank)


def _check_tensors(model: torch.nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = f"a {type(tensor).__name__}" if type(tensor) not in (torch.Tensor, torch.nn.Parameter) else None
        if kind is None and tensor.device.type != "cpu":
            kind = f"on {tensor.device}"
        if kind is None and tensor.layout is not torch.strided:
            kind = str(tensor.layout)
        if kind is not None and location_of(tensor) is None:
            raise Unsupported(
                f"{name} is {kind}: only models with plain tensors on the CPU are cut over workers so far"
            )
