"""Checks of users' arguments: named parameters, in groups. A refusal here leaves the job untouched."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.store.modes import SSP, Async, Mode, Sync, check_mode

Named = tuple[str, torch.nn.Parameter]
Params = Iterable[Named] | Iterable[dict[str, Any]]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def named_groups(named_parameters: Any) -> list[dict[str, Any]]:
    """The groups that were given, each with a list of (name, parameter) pairs; the caller's own stay as they are.

    Raises `ArgumentError` or `Unsupported`, with the parameter's name.
    """
    items = _listed(named_parameters)
    if not items:
        raise ArgumentError("StoreOptimizer got no parameters")
    grouped = isinstance(items[0], dict)
    groups = [named_group(i, item) for i, item in enumerate(items)] if grouped else [{"params": _named(items)}]
    check_parameters([pair for group in groups for pair in group["params"]])
    return groups


def named_group(number: int, group: Any) -> dict[str, Any]:
    """One group. Raises `ArgumentError`."""
    if not isinstance(group, dict):
        raise ArgumentError(f"a parameter group must be a dict with 'params', not a {type(group).__name__}")
    if "params" not in group:
        raise ArgumentError(f"parameter group {number} has no 'params': its (name, parameter) pairs")
    params = group["params"]
    return {**group, "params": _named([params] if isinstance(params, torch.Tensor) else _listed(params))}


def _listed(params: Any) -> list[Any]:
    if isinstance(params, torch.nn.Module):
        raise ArgumentError("a parameter group got a module for its 'params': pass its named_parameters()")
    if isinstance(params, set):
        raise ArgumentError("the order of a set differs between processes: pass parameters in a list")
    try:
        return list(params)
    except TypeError:
        raise ArgumentError(
            f"StoreOptimizer got a {type(params).__name__} for its parameters: pass model.named_parameters()"
        ) from None


def _named(items: Sequence[Any]) -> list[Named]:
    for item in items:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise ArgumentError("StoreOptimizer needs names: pass model.named_parameters(), not model.parameters()")
        if not isinstance(item[1], torch.Tensor):
            raise ArgumentError(f"parameter {item[0]!r} is a {type(item[1]).__name__}, not a tensor")
    return list(items)


def check_parameters(named: Sequence[Named]) -> None:
    """Raises `ArgumentError` or `Unsupported` for parameters that a store cannot hold side by side."""
    seen: set[int] = set()
    names: set[str] = set()
    for name, p in named:
        if id(p) in seen:
            raise ArgumentError(f"parameter {name!r} is given twice: named_parameters() gives each parameter once")
        if name in names:
            raise ArgumentError(f"two parameters have the name {name!r}")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ArgumentError(f"the parameter's name {name!r} is not valid Unicode") from None
        seen.add(id(p))
        names.add(name)
        check_tensor(f"parameter {name!r}", p)
        if not p.is_leaf:
            raise ArgumentError(f"parameter {name!r} is the result of an operation: an optimizer updates leaves only")
    _check_apart([p for _, p in named])


def check_tensor(what: str, tensor: torch.Tensor) -> None:
    """Raises `Unsupported` unless it is an ordinary dense tensor, `ArgumentError` if it has no memory.

    It is on the CPU, or on an accelerator that ``torch.accelerator`` knows.
    """
    known = tensor.is_cpu or is_on_accelerator(tensor)
    plain = type(tensor) in _PLAIN and known and tensor.layout is torch.strided and not tensor.is_nested
    if plain and _has_memory(tensor):
        return  # as nearly all, and every gradient comes here at each step
    if is_lazy(tensor):
        raise Unsupported(f"{what} has no shape yet: run the model once before constructing the optimizer")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").strip("_")
        raise Unsupported(f"{what} is not an ordinary dense tensor: it is {kind}")
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        kind = "fake" if isinstance(tensor, FakeTensor) else "meta"
        raise ArgumentError(f"{what} is a {kind} tensor, which has no memory: the store takes real tensors")
    if not known:
        raise ArgumentError(
            f"{what} is on {tensor.device}: the store takes tensors on the CPU and on torch.accelerator, which is "
            f"{torch.accelerator.current_accelerator()} here"
        )
    if not _has_memory(tensor):
        why = (
            "it is wrapped by torch.func" if _is_wrapped(tensor) else "its storage was freed, or it has none of its own"
        )
        raise ArgumentError(f"{what} has no memory: {why}")


def is_on_accelerator(tensor: torch.Tensor) -> bool:
    """Whether it is on a device of the accelerator that PyTorch knows here."""
    if tensor.is_cpu:
        return False
    known = torch.accelerator.current_accelerator()
    return known is not None and tensor.device.type == known.type


def _is_wrapped(tensor: torch.Tensor) -> bool:
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return wrapped


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether every element lies in the storage, and that has an address."""
    if not tensor.numel():
        return True
    try:
        storage = tensor.untyped_storage()
        needed = tensor.nbytes
        if not tensor.is_contiguous():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            needed = (last + 1) * tensor.element_size()
        return tensor.data_ptr() != 0 and storage.nbytes() >= needed + tensor.storage_offset() * tensor.element_size()
    except (RuntimeError, NotImplementedError):  # wrappers, also those that other libraries make
        return False


def _check_apart(params: Iterable[torch.nn.Parameter]) -> None:
    """Each parameter is to have a place of its own in the store. Raises `ArgumentError`."""
    spans = sorted((str(p.device), p.data_ptr(), p.data_ptr() + p.nbytes) for p in params if p.nbytes)
    if any(after[0] == before[0] and after[1] < before[2] for before, after in itertools.pairwise(spans)):
        raise ArgumentError(
            "two parameters share memory: tie them by using one Parameter in both places, as in "
            "model.head.weight = model.embedding.weight"
        )


def largest_norm(value: Any) -> float:
    """``max_grad_norm`` as it travels: 0 for none. Raises `ArgumentError`."""
    if value is None:
        return 0.0
    try:
        found = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else -1.0
    except OverflowError:
        found = -1.0
    if not found > 0:
        raise ArgumentError(f"max_grad_norm must be a number above 0, or None, not {value!r:.100}")
    return found


def overlap_of(overlap: bool | None, mode: Mode, groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a step overlaps with others: as the user says, else where it can and a parameter is on a device."""
    if overlap is not None:
        return overlap
    return isinstance(mode, Sync) and any(not p.is_cpu for group in groups for _, p in group["params"])


def check_mode_fits(mode: Mode, overlap: bool, defaults: Mapping[str, Any]) -> None:
    """Raises `ArgumentError` or `Unsupported` for what a mode does not go with."""
    check_mode(mode)
    if isinstance(mode, Sync):
        return
    if overlap:
        raise Unsupported(f"overlap=True works with mode=Sync() alone so far, not with {mode!r}")
    if isinstance(mode, (Async, SSP)) and mode.damping and "lr" not in defaults:
        raise ArgumentError(f"damping={mode.damping!r} lowers the option 'lr', which this optimizer does not have")


def refuse_overlapped(closure: object, scaled: bool) -> None:
    """Raises `Unsupported` for what `step()` cannot do where gradients were pushed in backward."""
    if closure is not None:
        raise Unsupported("with overlap=True step() takes no closure: its gradients would be pushed while it runs")
    if scaled:
        raise Unsupported(
            "with overlap=True a GradScaler comes too late: scaled gradients are pushed before it can unscale them or "
            "find an inf: use overlap=False, or bfloat16, which needs no scaling"
        )
