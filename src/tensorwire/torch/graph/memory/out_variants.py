"""Without the allocator: the ``out=`` variant of an operator, if it computes into ``out`` itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tensorwire.torch.graph.memory.target import MemoryTarget, same_storage

Signature = tuple[Any, ...]


class OutVariant:
    """``op`` with an ``out=``. Most overloads with one compute in other memory and copy, unless they have a CPU kernel.

    It is believed for arguments of those types with which it once made the same bits and strides as ``op``.
    """

    def __init__(self, op: torch._ops.OpOverload, out: str) -> None:
        self._op, self._out = op, out
        self._proved: dict[Signature, torch.dtype | None] = {}  # None: it failed

    @classmethod
    def of(cls, op: Any) -> OutVariant | None:
        """That of ``op``, or None if it has none that is worth it."""
        if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in op.tags:
            return None
        wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
        packet = op.overloadpacket
        for candidate in (getattr(packet, name) for name in packet.overloads()):
            arguments = candidate._schema.arguments
            outs = [a.name for a in arguments if a.is_out]
            if len(outs) == len(op._schema.returns) == 1 and wanted == [
                (a.name, str(a.type)) for a in arguments if not a.is_out
            ]:
                real = torch._C._dispatch_has_kernel_for_dispatch_key(candidate.name(), "CPU")
                return cls(candidate, outs[0]) if real else None
        return None

    def __call__(self, place: MemoryTarget, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """The result, born in ``place``. None, and nothing has happened, unless it is believed and of that size."""
        dtype = self._proved.get(_signature(args, kwargs))
        if dtype is None:
            return None
        return self._into(place, dtype, args, kwargs)

    def prove(
        self, result: torch.Tensor, place: MemoryTarget, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """A result like ``result``, which ``op`` made of these arguments, born in ``place``; None if it differs."""
        signature = _signature(args, kwargs)
        if signature in self._proved:
            return None
        made = self._into(place, result.dtype, args, kwargs)
        proved = made is not None and same_storage(made, result)
        self._proved[signature] = result.dtype if proved else None
        return made if proved else None

    def _into(
        self, place: MemoryTarget, dtype: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        try:
            made: torch.Tensor = self._op(*args, **kwargs, **{self._out: _unshaped(place, dtype)})
        except RuntimeError:  # it does not fit; or ``op`` fails too, and will say so
            return None
        needs = sum((n - 1) * stride for n, stride in zip(made.shape, made.stride(), strict=True)) + 1
        return made if made.numel() and needs * dtype.itemsize == place.nbytes else None


def _unshaped(place: MemoryTarget, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of no elements over a place: an ``out=`` operator gives it its shape."""
    return torch.empty(0, dtype=dtype, device="cpu").set_(place.lay().untyped_storage(), 0, (0,), (1,))


def _signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """What decides the dtype of the result: the arguments' dtypes, and the types of those that are not tensors."""
    return (*map(_kind, args), *((name, _kind(value)) for name, value in sorted(kwargs.items())))


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim() == 0
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    return value if isinstance(value, torch.dtype) else type(value)
