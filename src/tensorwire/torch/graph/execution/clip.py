"""``clip_grad_norm_`` for workers that each have the gradients of their own parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy
import torch

from tensorwire.errors import ArgumentError
from tensorwire.launch import Worker, current_worker
from tensorwire.torch.graph.execution.exchange import Exchange
from tensorwire.torch.graph.execution.job_group import group_of

# By number of parameters.
_exchanges: weakref.WeakKeyDictionary[Worker, dict[int, Exchange]] = weakref.WeakKeyDictionary()


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for a model whose modules are placed on several workers, instead of torch's.

    It gives the same norm, bit for bit, as in one process. Call it on every worker, with an optimizer of torch; a
    `StoreOptimizer` clips by ``max_grad_norm``.

    Args:
        parameters: The parameters of the whole model, in the same order on every worker. On each worker, only those
            that live there have gradients; these are multiplied in place.
        max_norm: The largest norm of all gradients together.
        norm_type: The order of the norm; ``inf`` for the largest element.
        error_if_nonfinite: Raise `RuntimeError` where the norm is NaN or inf.
        foreach: As in torch: whether to use the implementation for many tensors at once; None: where it is faster.

    Returns:
        The norm of all gradients before clipping, a tensor of shape ``()``.

    Raises:
        ArgumentError: A parameter has a gradient on two workers; or this process is in no job.
        RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
        PeerLost: Another worker is gone.
        JobEnded: The job ended; the message says why.
    """
    worker = current_worker()
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    made = _exchanges.setdefault(worker, {})
    exchange = made.get(len(given))
    if exchange is None:
        exchange = made[len(given)] = Exchange(group_of(worker), f"norms of {len(given)} gradients", 2 * len(given))
    mine = numpy.full(2 * len(given), numpy.nan)
    norms = [None if p.grad is None else torch.linalg.vector_norm(p.grad, norm_type) for p in given]
    for at, norm in enumerate(norms):
        mine[2 * at] = norm is not None
        mine[2 * at + 1] = 0.0 if norm is None else norm.item()
    with worker.member.explained():
        gathered = exchange.all(mine)
    total = _total(given, gathered, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the total norm of order {norm_type} of the gradients of all workers is {total.item()}")
    torch.nn.utils.clip_grads_with_norm_(given, max_norm, total, foreach)
    return total


def _total(given: list[torch.Tensor], gathered: dict[str, Any], norm_type: float) -> torch.Tensor:
    """As `torch.nn.utils.get_total_norm` has it: the norm of all norms, in the order of the parameters."""
    norms = []
    for at, parameter in enumerate(given):
        having = [worker for worker, numbers in gathered.items() if numbers[2 * at]]
        if len(having) > 1:
            raise ArgumentError(f"parameter {at} has a gradient on {', '.join(having)}: which one counts?")
        if having:
            norms.append(torch.tensor(gathered[having[0]][2 * at + 1], dtype=_norm_dtype(parameter.dtype)))
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real()
