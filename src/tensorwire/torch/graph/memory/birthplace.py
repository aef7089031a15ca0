"""Births: the output of an operator is allocated in chosen memory, so that sending it copies nothing."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from tensorwire.errors import ArgumentError, Unsupported
from tensorwire.torch.graph.memory.allocator import (
    MOST_OUTPUTS,
    ONLY_RECORD,
    SWITCH,
    Allocator,
    allocator,
    why_not,
)
from tensorwire.torch.graph.memory.out_variants import OutVariant
from tensorwire.torch.graph.memory.target import MemoryTarget, copied, over

__all__ = ["Birthplace", "MemoryTarget", "alive", "is_new", "over", "why_not"]

Outcome = tuple[Any, tuple[int, ...]]

# Their schemas say that they make new tensors, and they make views.
_SECRET_VIEWS = frozenset(
    f"aten::{name}"
    for name in ("_unsafe_view", "unsafe_split.Tensor", "unsafe_split_with_sizes", "unsafe_chunk", "lift")
)

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Birthplace:
    """Calls ``op`` so that those of its results that ``outputs`` names, by their numbers from 0, lie in given places.

    Nothing is known of ``op`` but what it allocates. Its first call is watched: an output was the k-th allocation of
    its size, and is copied to its place. In later calls the k-th allocation of that size is the place. Where that
    misses, the output is copied, and k learned anew. Bits and strides are those of ``op`` alone. An output that is an
    argument after all, which some operators return as it is, is copied each time.

    ``op`` is a node of a graph: an operator that makes new tensors on the CPU, called without gradients. Without the
    allocator (see `why_not`) its ``out=`` variant is taken if there is a real one, else each output is copied. Any
    thread may call, several at once too. ``missed`` counts outputs that did not land in their place; the first is one.

    Raises `ArgumentError` for an output that aliases an argument, and for more than 8 of them.
    """

    __slots__ = ("_allocator", "_op", "_out", "_skips", "missed", "outputs")

    def __init__(self, op: Callable[..., Any], outputs: Sequence[int] = (0,)) -> None:
        _check_outputs(op, outputs)
        self.outputs = tuple(outputs)
        self.missed = 0
        self._op = op
        self._skips = _pack([ONLY_RECORD] * len(outputs))
        self._allocator = allocator()
        self._out = OutVariant.of(op) if self._allocator is None and self.outputs == (0,) else None

    def __call__(
        self, places: Sequence[MemoryTarget], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NOTHING
    ) -> Outcome:
        """What ``op(*args, **kwargs)`` returns, with each output in its place; and the numbers of those that are not.

        An output lies in other memory only if its size in bytes differs. Otherwise its storage keeps the owner.

        Raises what ``op`` raises; the places are free then. `ArgumentError` if a storage that was born in a place
        still lives (``op`` was not called), or if an output is not a tensor or requires a gradient. `Unsupported` if a
        place went to something else than an output.
        """
        if len(places) != len(self.outputs):
            raise ArgumentError(f"{self._op}: {len(self.outputs)} outputs need as many places, not {len(places)}")
        native = self._allocator
        if native is None:
            result = self._copied(places, args, kwargs)
        else:
            result = _born(native, places, self._skips, self._op, args, kwargs)
        if type(result) is torch.Tensor and result.data_ptr() == places[0].address:
            return result, ()
        if type(result) is tuple and self._there(places, result):
            return result, ()
        tensors = list(result) if isinstance(result, (tuple, list)) else [result]
        kind = type(result) if isinstance(result, (tuple, list)) else operator.itemgetter(0)
        del result  # a storage that leaves its place is to die at once
        if native is not None:
            self._learn(native, places, tensors)
        return self._settled(places, tensors, kind)

    def _copied(self, places: Sequence[MemoryTarget], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Without the allocator: the ``out=`` variant's result in its place, or the operator's anywhere."""
        for n, place in enumerate(places):
            if place.laid or (place.nbytes and place.address in [other.address for other in places[:n]]):
                raise _refusal(self._op, place)
        if self._out is None:
            return self._op(*args, **kwargs)
        made = self._out(places[0], args, kwargs)
        if made is not None:
            return made
        result = self._op(*args, **kwargs)
        proof = self._out.prove(result, places[0], args, kwargs)
        return result if proof is None else proof

    def _there(self, places: Sequence[MemoryTarget], result: tuple[Any, ...]) -> bool:
        """In a hurry: False may be wrong."""
        try:
            for place, i in zip(places, self.outputs, strict=True):
                if result[i].data_ptr() != place.address:
                    return False
        except (AttributeError, IndexError):  # there is no such output in this call
            return False
        return True

    def _picked(self, tensors: Sequence[Any]) -> list[torch.Tensor]:
        for i in self.outputs:
            if i >= len(tensors) or not isinstance(tensors[i], torch.Tensor):
                raise ArgumentError(f"output {i} of {self._op} is not a tensor in this call")
        return [tensors[i] for i in self.outputs]

    def _learn(self, native: Allocator, places: Sequence[MemoryTarget], tensors: Sequence[Any]) -> None:
        """Finds, for each output that is not in its place, which allocation of its size it was."""
        skips = list(_unpack(self._skips))
        for n, (place, tensor) in enumerate(zip(places, self._picked(tensors), strict=True)):
            if not place.holds(tensor):
                storage = tensor.untyped_storage()
                found = native.which(storage.data_ptr(), storage.nbytes())
                skips[n] = found if 0 <= found < ONLY_RECORD else ONLY_RECORD
        self._skips = _pack(skips)

    def _settled(self, places: Sequence[MemoryTarget], tensors: list[Any], kind: Callable[..., Any]) -> Outcome:
        """Copies outputs to their places. ``tensors`` has the only references to them."""
        self._clear(places, tensors)
        astray = []
        for i, place in zip(self.outputs, places, strict=True):
            if place.holds(tensors[i]):
                continue
            self.missed += 1
            if tensors[i].untyped_storage().nbytes() != place.nbytes:
                astray.append(i)
            elif tensors[i].requires_grad:
                raise ArgumentError(f"{self._op} was called with gradients: births need torch.no_grad()")
            else:
                tensors[i] = copied(tensors[i], self._memory(place))
        return kind(tensors), tuple(astray)

    def _clear(self, places: Sequence[MemoryTarget], tensors: list[Any]) -> None:
        """Moves outputs out of places that are another's."""
        self._picked(tensors)
        own = dict(zip(self.outputs, places, strict=True))
        for i in range(len(tensors)):
            strange = [place for place in places if place.nbytes and place is not own.get(i)]
            if isinstance(tensors[i], torch.Tensor) and any(place.holds(tensors[i]) for place in strange):
                nbytes = tensors[i].untyped_storage().nbytes()
                tensors[i] = copied(tensors[i], torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        for i, place in own.items():
            if alive(place) and not place.holds(tensors[i]):
                # What the operator keeps for itself, or what a finalizer or a signal's handler made meanwhile.
                raise Unsupported(f"{self._op}: the place of output {i} went to another tensor: set {SWITCH}=off")

    def _memory(self, place: MemoryTarget) -> torch.Tensor:
        """The bytes of a place, as if they were born there."""
        if self._allocator is None:
            return place.lay()
        options = {"dtype": torch.uint8, "device": "cpu"}
        bytes_: torch.Tensor = _born(self._allocator, [place], _FIRST, torch.empty, (place.nbytes,), options)
        return bytes_


def is_new(op: Any, output: int) -> bool:
    """Whether that output of an operator is a new tensor, by its schema and by what is known of those that hide it.

    Raises `ArgumentError` if ``op`` has no such output.
    """
    if not isinstance(op, torch._ops.OpOverload):
        return True
    returns = op._schema.returns
    listed = len(returns) == 1 and isinstance(returns[0].type, torch.ListType)
    if not listed and output >= len(returns):
        raise ArgumentError(f"{op} has {len(returns)} outputs; there is no {output}")
    name: str = op.name()  # type: ignore[no-untyped-call]
    return name not in _SECRET_VIEWS and returns[0 if listed else output].alias_info is None


def alive(place: MemoryTarget) -> bool:
    """Whether a storage that was born or copied there still lives: until it dies, nothing else can be born there."""
    native = allocator()
    return place.laid if native is None else bool(native.taken(place.address))


def _born(
    native: Allocator,
    places: Sequence[MemoryTarget],
    skips: bytes,
    op: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls with the places armed."""
    packed = places[0].packed if len(places) == 1 else b"".join([place.packed for place in places])
    began = 0
    try:
        began = native.begin(len(places), packed, skips)
        if began:
            raise _refusal(op, places[began - 1])
        return op(*args, **kwargs)
    finally:
        if began == 0:
            native.end()


def _refusal(op: Any, place: MemoryTarget) -> ArgumentError:
    return ArgumentError(
        f"{op}: a tensor born at {place.address:#x} is still alive, or two outputs have this place:"
        " an output needs memory of its own"
    )


def _check_outputs(op: Any, outputs: Sequence[int]) -> None:
    if not 0 < len(set(outputs)) == len(outputs) <= MOST_OUTPUTS or min(outputs) < 0:
        raise ArgumentError(f"outputs must be 1 to {MOST_OUTPUTS} different numbers from 0 on, not {tuple(outputs)}")
    for i in outputs:
        if not is_new(op, i):
            raise ArgumentError(f"output {i} of {op} is memory of an argument: its birthplace is where that is made")


def _pack(skips: Sequence[int]) -> bytes:
    return struct.pack(f"@{len(skips)}I", *skips)


def _unpack(skips: bytes) -> tuple[int, ...]:
    return struct.unpack(f"@{len(skips) // 4}I", skips)


_FIRST = _pack([0])
