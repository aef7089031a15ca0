"""``place`` and ``unplace``: modules are given to hosts, and what is not of this host gives its memory back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.launch import current_worker
from tensorwire.torch.graph.placement.compile_check import unwatch, watch
from tensorwire.torch.graph.placement.registry import (
    Hosts,
    check_host,
    forget,
    known,
    owner_of,
    register,
    unwrapped,
    was_alone,
)
from tensorwire.torch.graph.placement.remote_tensor import fill, lives, vacate

_ADVICE = (
    "this process is {}. What Python reads in a model, as item() does, is not part of the graph: compute with the "
    "tensor instead. If the model did not mean to, dynamo left this part out: TORCH_LOGS=graph_breaks says why"
)
M = TypeVar("M", bound=torch.nn.Module)


def place(model: M, hosts: Hosts, *, host: str | None = None) -> M:
    """Decides which worker runs which module of ``model``, and keeps only this worker's parameters and buffers.

    Call it on every worker, after loading and before ``torch.compile(model, backend="tensorwire")``. If the model has
    run compiled before, everything that torch has compiled in this process is dropped, and compiled again by the next
    call.

    A parameter of another worker keeps name, shape and dtype, takes no memory, and raises `LivesElsewhere` when it is
    read; optimizers skip it, as it has no gradient. A tensor that several modules share lives with the first of them.
    From here on, a placed module that runs uncompiled raises `Unsupported`: see `unplace`.

    Args:
        model: Its parameters and buffers are plain tensors on the CPU, of any shape and dtype.
        hosts: The worker of each module, such as ``{"": "worker:0", "layers.2": "worker:1"}``: by dotted path, as in
            ``named_modules()``, which covers everything below it; ``""`` is the rest. What has no worker is kept by
            all.
        host: This process's own worker; by default the one of its rank.

    Returns:
        ``model``.

    Raises:
        ArgumentError: A name fits nothing, or the model was placed before. The model is unchanged.
        Unsupported: A parameter or buffer is not a plain tensor on the CPU. The model is unchanged.
    """
    inner = unwrapped(model)
    mine = _own_host(host, hosts)
    _check_tensors(inner)
    if known(inner) is not None:
        raise ArgumentError(
            "this model has its hosts already, from place() or from the options of torch.compile: place it once, "
            "before the first compiled call, and without options={'hosts': ...}; unplace(model) takes them back"
        )
    register(inner, hosts)
    if was_alone(inner):  # what was compiled then would run on every worker
        torch.compiler.reset()
    watch(inner)
    for tensor in (*inner.parameters(), *inner.buffers()):
        owner = owner_of(tensor)
        if owner is not None and owner.host not in (None, mine) and lives(tensor) is None:
            vacate(tensor, owner.name, str(owner.host), advice=_ADVICE.format(mine))
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
        raise ArgumentError("this model was not placed: give unplace() the model that place() was given")
    values = []
    for name, tensor in (*inner.named_parameters(), *inner.named_buffers()):
        if (where := lives(tensor)) is not None:
            value = (state or {}).get(name)
            if value is None:
                raise ArgumentError(f"{name} lives on {where.host}: unplace(model, state) needs its value in state")
            if value.shape != tensor.shape or value.dtype != tensor.dtype or lives(value) is not None:
                raise ArgumentError(
                    f"{name} is {list(tensor.shape)} of {tensor.dtype}; in state it is "
                    + (f"on {gone.host} too" if (gone := lives(value)) else f"{list(value.shape)} of {value.dtype}")
                )
            values.append((tensor, value))
    unwatch(inner)
    forget(inner)
    for tensor, value in values:
        fill(tensor, value)
    return model


def _own_host(host: str | None, hosts: Hosts) -> str:
    if host is not None:
        check_host(host)
        return host
    worker = current_worker()
    workers = [f"worker:{rank}" for rank in range(worker.num_workers)]
    for name in hosts.values() if isinstance(hosts, Mapping) else ():  # the rest is refused later
        if name not in workers:
            raise ArgumentError(f"there is no {name!r}: this job has the hosts {', '.join(workers)}")
    return workers[worker.rank]


def _check_tensors(model: torch.nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = f"a {type(tensor).__name__}" if type(tensor) not in (torch.Tensor, torch.nn.Parameter) else None
        if kind is None and tensor.device.type != "cpu":
            kind = f"on {tensor.device}"
        if kind is None and tensor.layout is not torch.strided:
            kind = str(tensor.layout)
        if kind is not None and lives(tensor) is None:
            raise Unsupported(f"{name} is {kind}: place() takes models whose tensors are plain ones on the CPU")
